"""The model side of one process: policy, rollout and learner, wired from the configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from areno.api.loss_fns import PolicyLoss, policy_loss
from areno.config import RunConfig
from areno.engine.learner import GradientReducer, Learner, LocalReducer
from areno.engine.model import Policy, load_policy
from areno.engine.rollout import HfRollout, Rollout


@dataclass(frozen=True)
class Engine:
    """One policy that both samples and learns."""

    policy: Policy
    rollout: Rollout
    learner: Learner


def build_engine(config: RunConfig, tokenizer: Any, reducer: GradientReducer | None = None) -> Engine:
    """Load the model and set up rollout and learner around it.

    Raises:
        UsageError: the checkpoint cannot be loaded.
    """
    share_cpus(config.basic.world_size)
    policy = load_policy(config.basic, config.train, tokenizer)
    temperature = 1.0 if config.rollout.greedy else config.rollout.temperature
    learner = Learner(
        policy,
        config.train,
        loss_of(config),
        temperature=temperature,
        reducer=LocalReducer() if reducer is None else reducer,
    )
    return Engine(policy, HfRollout(policy, config.rollout.rollout_rows), learner)


def share_cpus(world_size: int) -> None:
    """Give each worker its part of the cores. Set on purpose: the number of threads changes float sums, and so what is
    sampled, and it must not depend on who started the process."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))


def loss_of(config: RunConfig) -> PolicyLoss:
    """The loss that the options name."""
    train = config.train
    clip_eps = train.grpo_clip_eps if config.basic.algo == "grpo" else train.gspo_clip_eps
    return policy_loss(config.basic.algo, clip_eps=clip_eps, ratio=train.ratio)
