"""Sample completions with transformers' own generation.

Axes: G prompt groups, B rows side by side (a group's samples are neighbours), P padded prompt length, V vocabulary,
T positions of a completion.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from areno.api.models import SamplingParams
from areno.engine.model import Policy
from areno.engine.sampling import draw, uniform_streams
from areno.engine.small_batch import small_batch_products
from areno.errors import RunError
from areno.materialize.rollout_batch import LENGTH, STOPPED, RolloutBatch, offsets_of


class Rollout(Protocol):
    """The seam between the loop and whatever samples."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        prompt_indices: Sequence[int],
        n_samples: int,
        params: SamplingParams,
        step: int,
    ) -> Iterator[RolloutBatch]:
        """Sample `n_samples` completions of every prompt.

        Yields chunks of whole consecutive prompt groups, in the order given; together they are exactly `prompts`. What
        a row becomes is set by the weights and (params.seed, step, prompt index, sample index), not by its neighbours.

        Raises:
            RunError: the model gives no finite logits; step, prompt index and sample index are named.
        """
        ...


class HfRollout:
    """`model.generate`, at most `rows` completions side by side (but always at least one prompt group)."""

    def __init__(self, policy: Policy, rows: int) -> None:
        self._policy = policy
        self._rows = rows

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        prompt_indices: Sequence[int],
        n_samples: int,
        params: SamplingParams,
        step: int,
    ) -> Iterator[RolloutBatch]:
        """See `Rollout.generate`.

        Raises:
            ValueError: a prompt without tokens, or not one index per prompt.
        """
        if len(prompts) != len(prompt_indices):
            raise ValueError(f"{len(prompts)} prompts but {len(prompt_indices)} prompt indices.")
        for index, prompt in zip(prompt_indices, prompts, strict=True):
            if len(prompt) == 0:
                raise ValueError(f"prompt {index} has no tokens: there is nothing to continue.")
        groups = max(1, self._rows // n_samples)
        for start in range(0, len(prompts), groups):
            part = slice(start, start + groups)
            yield self._sample_groups(prompts[part], prompt_indices[part], n_samples, params, step)

    def _sample_groups(
        self,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        n_samples: int,
        params: SamplingParams,
        step: int,
    ) -> RolloutBatch:
        rows = [(index, sample) for index in indices for sample in range(n_samples)]
        uniforms_BT = uniform_streams(params.seed, step, rows, params.max_new_tokens)
        sampler = _Sampler(torch.from_numpy(uniforms_BT.T).to(self._policy.device), params)
        with _sampling_mode(self._policy.model):
            tokens_BT = self._run(prompts, n_samples, sampler)
        stopped_B, lens_B = _ends(tokens_BT, self._policy.end_token_ids)
        kept_BT = torch.arange(tokens_BT.shape[1], device=lens_B.device) < lens_B[:, None]
        # transformers may have sampled a step more than it returns.
        logprobs_BT = torch.stack(sampler.logprobs[: tokens_BT.shape[1]], dim=1)
        _refuse_not_finite(logprobs_BT, kept_BT, rows, step)
        return RolloutBatch(
            prompt_tokens_P=np.concatenate([np.asarray(p, dtype=np.int32) for p in prompts]),
            prompt_offsets_G1=offsets_of([len(p) for p in prompts]),
            group_offsets_G1=offsets_of([n_samples] * len(prompts)),
            response_tokens_T=tokens_BT[kept_BT].int().cpu().numpy(),
            response_logprobs_T=logprobs_BT[kept_BT].cpu().numpy(),
            response_offsets_N1=offsets_of(lens_B.cpu().numpy()),
            finish_N=np.where(stopped_B.cpu().numpy(), STOPPED, LENGTH).astype(np.uint8),
            policy_version=step,
        )

    def _run(self, prompts: Sequence[Sequence[int]], n_samples: int, sampler: _Sampler) -> torch.Tensor:
        """int64 [B, T]: the sampled tokens, and padding after each row's end token."""
        policy = self._policy
        ids_GP, mask_GP = _left_padded(prompts, policy.pad_token_id, policy.device)
        width = ids_GP.shape[1]
        cache = _shared_prefill(policy.model, ids_GP[:, : width - 1], mask_GP[:, : width - 1], n_samples)
        out: torch.Tensor = policy.model.generate(
            ids_GP.repeat_interleave(n_samples, dim=0),
            attention_mask=mask_GP.repeat_interleave(n_samples, dim=0),
            logits_processor=LogitsProcessorList([sampler]),
            generation_config=_settings(
                max_new_tokens=len(sampler.uniforms_TB),
                do_sample=False,
                eos_token_id=list(policy.end_token_ids) or None,
                pad_token_id=policy.pad_token_id,
            ),
            **cache,
        )
        return out[:, width:]


class _Sampler(LogitsProcessor):
    """Draws the token itself, and leaves `generate` no choice but to take it.

    Keeps one logprob per row and position, so no more than one step's [B, V] is ever alive.
    """

    def __init__(self, uniforms_TB: torch.Tensor, params: SamplingParams) -> None:
        self.uniforms_TB = uniforms_TB
        self.logprobs: list[torch.Tensor] = []
        self._params = params

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        tokens_B, logprobs_B = draw(scores, self.uniforms_TB[len(self.logprobs)], self._params)
        self.logprobs.append(logprobs_B)
        return scores.fill_(-torch.inf).scatter_(1, tokens_B[:, None], 0.0)


@contextmanager
def _sampling_mode(model: Any) -> Iterator[None]:
    """Evaluation mode, no gradient, and none of the checkpoint's generation settings.

    `generate` fills what a configuration leaves open from the model's own: a repetition penalty there would change the
    distribution behind the logprobs' back.
    """
    settings, training = model.generation_config, model.training
    model.generation_config = _settings()
    model.eval()
    try:
        with torch.no_grad(), small_batch_products(model):
            yield
    finally:
        model.generation_config = settings
        model.train(training)


def _settings(**values: Any) -> Any:
    return GenerationConfig(**values)  # type: ignore[no-untyped-call]


def _left_padded(
    prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [G, P] ids and mask, padding on the left."""
    width = max(len(p) for p in prompts)
    ids_GP = np.full((len(prompts), width), pad_token_id, dtype=np.int64)
    mask_GP = np.zeros_like(ids_GP)
    for g, prompt in enumerate(prompts):
        ids_GP[g, width - len(prompt) :] = prompt
        mask_GP[g, width - len(prompt) :] = 1
    return torch.from_numpy(ids_GP).to(device), torch.from_numpy(mask_GP).to(device)


def _shared_prefill(model: Any, ids_GP: torch.Tensor, mask_GP: torch.Tensor, n_samples: int) -> dict[str, Any]:
    """Compute keys and values of the prompts (all but their last token) once per prompt, not once per sample.

    Returns:
        The cache, repeated for each sample, under the name by which this version of transformers passes it on; nothing
        where sharing gains nothing or the model keeps another kind of state.
    """
    cache = DynamicCache(config=model.config)
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    if n_samples == 1 or ids_GP.shape[1] == 0 or not cache.layers or not plain:
        return {}
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    position_ids_GP = (mask_GP.cumsum(dim=-1) - 1).clamp(min=0)
    model(
        ids_GP, attention_mask=mask_GP, position_ids=position_ids_GP, use_cache=True, logits_to_keep=1, **{name: cache}
    )
    cache.batch_repeat_interleave(n_samples)
    return {name: cache}


def _ends(tokens_BT: torch.Tensor, end_token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [B]: the row stopped at an end token; int64 [B]: its length, the end token included."""
    is_end_BT = torch.isin(tokens_BT, torch.tensor(list(end_token_ids), device=tokens_BT.device, dtype=torch.int64))
    stopped_B = is_end_BT.any(dim=1)
    first_B = is_end_BT.int().argmax(dim=1)
    return stopped_B, torch.where(stopped_B, first_B + 1, tokens_BT.shape[1])


def _refuse_not_finite(
    logprobs_BT: torch.Tensor, kept_BT: torch.Tensor, rows: Sequence[tuple[int, int]], step: int
) -> None:
    bad_BT = ~logprobs_BT.isfinite() & kept_BT
    if bool(bad_BT.any()):
        b, t = (int(i) for i in bad_BT.nonzero()[0])
        prompt_index, sample_index = rows[b]
        raise RunError(
            f"Step {step}, prompt {prompt_index}, sample {sample_index}: the logits are not finite at token {t}. "
            "The weights have diverged (lower --lr) or the checkpoint is damaged."
        )
