"""The plain way, kept for the tests: per-sample decode, per-token lists, one group at a time, rows re-packed one by one.

Slow on purpose and written without looking at the fast path's tricks; the fast path must equal it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from areno.api.data import PromptItem
from areno.api.models import TrainSequence
from areno.materialize.rollout_batch import STOPPED, RolloutBatch


def group_advantages(rewards: list[float], eps: float = 1e-8) -> list[float]:
    """One group, one numpy call each: (r - mean) / (population std + eps), exactly 0 for equal rewards."""
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    group = np.array(rewards, dtype=np.float64)
    return ((group - group.mean()) / (group.std() + eps)).tolist()


def rows_of(rollout: RolloutBatch) -> list[tuple[int, int, list[int], list[int], list[float], list[bool], int]]:
    """(group, sample, prompt ids, response ids, logprobs, mask, finish) of each completion, as Python lists."""
    rows = []
    for g in range(rollout.num_groups):
        prompt = rollout.prompt_tokens_P[rollout.prompt_offsets_G1[g] : rollout.prompt_offsets_G1[g + 1]].tolist()
        first = int(rollout.group_offsets_G1[g])
        for i in range(first, int(rollout.group_offsets_G1[g + 1])):
            a, b = int(rollout.response_offsets_N1[i]), int(rollout.response_offsets_N1[i + 1])
            mask = [True] * (b - a) if rollout.loss_mask_T is None else rollout.loss_mask_T[a:b].tolist()
            rows.append(
                (
                    g,
                    i - first,
                    prompt,
                    rollout.response_tokens_T[a:b].tolist(),
                    rollout.response_logprobs_T[a:b].tolist(),
                    mask,
                    int(rollout.finish_N[i]),
                )
            )
    return rows


def materialize(
    rollout: RolloutBatch, items: list[PromptItem], tokenizer: Any, reward: Callable[[str, PromptItem], float]
) -> tuple[list[TrainSequence], list[float], list[str]]:
    """Train sequences, rewards and texts, sample after sample."""
    rows = rows_of(rollout)
    texts, rewards = [], []
    for g, _, _, response, _, _, finish in rows:
        ended = finish == STOPPED and response and response[-1] == tokenizer.eos_token_id
        texts.append(tokenizer.decode(response[:-1] if ended else response, skip_special_tokens=False))
        rewards.append(reward(texts[-1], items[g]))
    sequences = []
    for g in range(rollout.num_groups):
        members = [i for i, row in enumerate(rows) if row[0] == g]
        for i, advantage in zip(members, group_advantages([rewards[i] for i in members]), strict=True):
            _, _, prompt, response, logprobs, mask, _ = rows[i]
            sequences.append(
                TrainSequence(
                    prompt_mask=[True] * len(prompt) + [False] * len(response),
                    loss_mask=[False] * len(prompt) + mask,
                    tokens=prompt + response,
                    logprobs=[0.0] * len(prompt) + logprobs,
                    advantages=[0.0] * len(prompt) + [advantage] * len(response),
                    reward=rewards[i],
                    eos_token_id=tokenizer.eos_token_id,
                )
            )
    return sequences, rewards, texts


def padded(sequences: list[TrainSequence], with_loss_mask: bool) -> dict[str, Any]:
    """The padded pack, token by token."""
    length = max((len(s.tokens) for s in sequences), default=0)
    rows: dict[str, list[list[Any]]] = {
        k: [] for k in ("input_ids", "prompt_mask", "logprobs", "advantages", "loss_mask")
    }
    for s in sequences:
        gap = length - len(s.tokens)
        rows["input_ids"].append(s.tokens + [s.eos_token_id] * gap)
        rows["prompt_mask"].append(s.prompt_mask + [True] * gap)
        rows["logprobs"].append(s.logprobs + [0.0] * gap)
        rows["advantages"].append(s.advantages + [0.0] * gap)
        rows["loss_mask"].append(s.loss_mask + [False] * gap)
    pack: dict[str, Any] = {
        "input_ids": torch.tensor(rows["input_ids"], dtype=torch.int64),
        "labels": torch.tensor(rows["input_ids"], dtype=torch.int64),
        "lengths": torch.tensor([len(s.tokens) for s in sequences], dtype=torch.int32),
        "prompt_mask": torch.tensor(rows["prompt_mask"], dtype=torch.bool),
        "logprobs": torch.tensor(rows["logprobs"], dtype=torch.float32),
        "advantages": torch.tensor(rows["advantages"], dtype=torch.float32),
    }
    if with_loss_mask:
        pack["loss_mask"] = torch.tensor(rows["loss_mask"], dtype=torch.bool)
    return pack


def packed(sequences: list[TrainSequence]) -> dict[str, Any]:
    """The packed pack, token by token."""
    ids, positions, cu, mask, seq_ids, advantages, logprobs = [], [], [0], [], [], [], []
    for b, s in enumerate(sequences):
        for t, token in enumerate(s.tokens):
            ids.append(token)
            positions.append(t)
            if t > 0:
                mask.append((not s.prompt_mask[t]) and s.loss_mask[t])
                seq_ids.append(b)
                advantages.append(s.advantages[t])
                logprobs.append(s.logprobs[t])
        cu.append(len(ids))
    return {
        "input_ids": torch.tensor([ids], dtype=torch.int64),
        "position_ids": torch.tensor([positions], dtype=torch.int64),
        "train_cu_seqlens": torch.tensor(cu, dtype=torch.int32),
        "train_max_seqlen": max((len(s.tokens) for s in sequences), default=0),
        "packed_num_sequences": len(sequences),
        "packed_response_mask": torch.tensor(mask, dtype=torch.bool),
        "packed_seq_ids": torch.tensor(seq_ids, dtype=torch.int64),
        "packed_advantages": torch.tensor(advantages, dtype=torch.float32),
        "packed_logprobs": torch.tensor(logprobs, dtype=torch.float32),
    }


def loss(algo: str, pack: dict[str, Any], logprobs: torch.Tensor, clip_eps: float) -> torch.Tensor:
    """GRPO or GSPO at ratio `unit`, row by row and token by token, over a padded pack."""
    terms, count = [], 0
    for b in range(logprobs.shape[0]):
        sites = [
            t
            for t in range(logprobs.shape[1])
            if not pack["prompt_mask"][b, t + 1] and ("loss_mask" not in pack or pack["loss_mask"][b, t + 1])
        ]
        if not sites:
            continue
        if algo == "grpo":
            for t in sites:
                ratio = torch.exp(logprobs[b, t] - logprobs[b, t].detach())
                a = pack["advantages"][b, t + 1].double()
                terms.append(-torch.minimum(ratio * a, ratio.clamp(1 - clip_eps, 1 + clip_eps) * a))
            count += len(sites)
        else:
            ratio = torch.exp(sum(logprobs[b, t] - logprobs[b, t].detach() for t in sites) / len(sites))
            a = pack["advantages"][b, sites[0] + 1].double()
            terms.append(-torch.minimum(ratio * a, ratio.clamp(1 - clip_eps, 1 + clip_eps) * a))
            count += 1
    return sum(terms) / count if terms else logprobs.sum() * 0.0


def equal_packs(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Assert that two packs have the same keys, types, shapes and bits."""
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[key].dtype, key
            assert value.shape == b[key].shape, key
            assert torch.equal(value, b[key]), key
        else:
            assert value == b[key], key
