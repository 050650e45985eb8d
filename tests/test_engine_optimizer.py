from __future__ import annotations

import dataclasses

import pytest
import torch

from areno.config import TrainConfig
from areno.engine.optimizer import MasterAdamW, learning_rate

TRAIN = TrainConfig(lr=1.0, min_lr=0.1, lr_warmup_steps=10, lr_decay_steps=110)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("cosine", {1: 0.1, 5: 0.5, 10: 1.0, 35: 0.1 + 0.9 * 0.8535533905932737, 60: 0.55, 110: 0.1, 999: 0.1}),
        ("linear", {1: 0.1, 10: 1.0, 60: 0.55, 85: 0.325, 110: 0.1, 999: 0.1}),
        ("constant", {1: 0.1, 9: 0.9, 10: 1.0, 60: 1.0, 999: 1.0}),
    ],
)
def test_learning_rate(style: str, expected: dict[int, float]) -> None:
    train = dataclasses.replace(TRAIN, lr_decay_style=style)  # type: ignore[arg-type]
    assert {step: learning_rate(step, train) for step in expected} == pytest.approx(expected)


def test_without_warm_up_the_first_step_counts() -> None:
    train = dataclasses.replace(TRAIN, lr_warmup_steps=0, lr_decay_style="linear", lr_decay_steps=9)
    assert learning_rate(1, train) == pytest.approx(0.9)
    assert learning_rate(1, dataclasses.replace(train, lr_warmup_steps=20)) == pytest.approx(0.05)
    assert learning_rate(30, dataclasses.replace(train, lr_warmup_steps=20)) == pytest.approx(0.1)


def test_master_weights_keep_what_bf16_would_lose() -> None:
    train = dataclasses.replace(TRAIN, weight_decay=0.0)
    low = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    full = torch.nn.Parameter(torch.ones(4))
    ours, reference = MasterAdamW([low], train), MasterAdamW([full], train)
    for _ in range(100):
        low.grad, full.grad = torch.ones_like(low), torch.ones_like(full)
        ours.collect_gradients()
        for optimizer in (ours, reference):
            optimizer.step(1e-4)
            optimizer.zero_gradients()
    # Each update of 1e-4 is far below half of bf16's spacing under 1, which is 0.002.
    torch.testing.assert_close(ours.weights[0], full.data)
    torch.testing.assert_close(low.float(), full.data.bfloat16().float())
    assert low[0] < 0.995
    assert reference.weights[0] is full


def test_gradients_add_up_in_float32() -> None:
    low = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([low], TRAIN)
    for size in (256.0, *[0.5] * 10):
        low.grad = torch.full_like(low, size)
        optimizer.collect_gradients()
        assert low.grad is None
    gradient = optimizer.weights[0].grad
    assert gradient is not None
    assert gradient.item() == 261.0
    optimizer.zero_gradients()
    assert optimizer.weights[0].grad is None


def test_frozen_parameters_are_left_alone() -> None:
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    assert MasterAdamW([frozen, torch.nn.Parameter(torch.ones(1))], TRAIN).weights[0] is not frozen
