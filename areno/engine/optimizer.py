"""AdamW over float32 (or float64) weights, whatever the model computes in, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from areno.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 1.

    Rises linearly to `lr` at step `lr_warmup_steps`, then falls in the chosen style to `min_lr` at step
    `lr_decay_steps` and stays there; `constant` stays at `lr`.
    """
    if step < train.lr_warmup_steps:
        return train.lr * step / train.lr_warmup_steps
    if train.lr_decay_style == "constant":
        return train.lr
    span = max(train.lr_decay_steps - train.lr_warmup_steps, 1)
    progress = min((step - train.lr_warmup_steps) / span, 1.0)
    share = 1.0 - progress if train.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return train.min_lr + share * (train.lr - train.min_lr)


class MasterAdamW:
    """AdamW whose state and weights are at least float32.

    A bfloat16 weight has 8 bits: an update below 1/256 of it would be rounded away at every step. Such a parameter gets
    a float32 master that gradients accumulate in and updates add up in; the parameter is its rounded copy.

    weights: what is optimized, each with its `.grad`; the model's own parameters where those are float32 or float64.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], train: TrainConfig) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self.weights: list[torch.Tensor] = [_master_of(p) for p in self._parameters]
        self._adam = torch.optim.AdamW(
            self.weights,
            lr=train.lr,
            betas=(train.adam_beta1, train.adam_beta2),
            weight_decay=train.weight_decay,
            fused=True,  # one pass over weights and states instead of a dozen
        )

    def collect_gradients(self) -> None:
        """After a backward pass: move what it left on low-precision parameters into the masters' gradients."""
        for parameter, weight in self._copies():
            if parameter.grad is not None:
                gradient = parameter.grad.to(weight.dtype)
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
                parameter.grad = None

    def zero_gradients(self) -> None:
        """Forget all gradients, collected or not."""
        for parameter, weight in zip(self._parameters, self.weights, strict=True):
            parameter.grad = weight.grad = None

    def step(self, lr: float) -> None:
        """Apply the gradients, and round the new weights into the model."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        with torch.no_grad():
            for parameter, weight in self._copies():
                parameter.copy_(weight)

    def _copies(self) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor]]:
        return ((p, w) for p, w in zip(self._parameters, self.weights, strict=True) if p is not w)


def _master_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter if dtype == parameter.dtype else parameter.detach().to(dtype)
