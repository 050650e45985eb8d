from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine_fixtures import END, OTHER_END, tiny_model, tiny_policy, tiny_tokenizer

import areno.engine.rollout as rollout_module
from areno.api.models import SamplingParams
from areno.engine.model import Policy, policy_of
from areno.engine.rollout import HfRollout
from areno.engine.scripted import ScriptedCompletion, ScriptedRollout, seeded_script
from areno.errors import RunError
from areno.materialize.rollout_batch import LENGTH, STOPPED, RolloutBatch

PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [20, 21]]


def sample(
    policy: Policy, params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS, *, rows: int = 64, first: int = 0,
    n_samples: int = 3, step: int = 2,
) -> list[RolloutBatch]:  # fmt: skip
    indices = range(first, first + len(prompts))
    rollout = HfRollout(policy, rows)
    return list(rollout.generate(prompts, prompt_indices=indices, n_samples=n_samples, params=params, step=step))


def rows_of(batch: RolloutBatch) -> list[list[int]]:
    o = batch.response_offsets_N1
    return [batch.response_tokens_T[o[i] : o[i + 1]].tolist() for i in range(batch.num_completions)]


@torch.no_grad()
def teacher_forced(policy: Policy, batch: RolloutBatch, temperature: float) -> np.ndarray:
    """Each completion scored alone, without padding, cache or batch."""
    out = []
    for i, response in enumerate(rows_of(batch)):
        g = batch.group_of_row_N[i]
        prompt = batch.prompt_tokens_P[batch.prompt_offsets_G1[g] : batch.prompt_offsets_G1[g + 1]].tolist()
        logits = policy.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
        out.append((logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1))
    return torch.cat(out).numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("narrowed", [{}, {"top_k": 10, "top_p": 0.8}])
def test_logprobs_equal_a_teacher_forced_forward(temperature: float, narrowed: dict[str, float]) -> None:
    policy = tiny_policy()
    params = SamplingParams(max_new_tokens=20, temperature=temperature, **narrowed)  # type: ignore[arg-type]
    (batch,) = sample(policy, params)
    expected = teacher_forced(policy, batch, temperature)
    assert np.abs(batch.response_logprobs_T - expected).mean() < 1e-5
    assert np.abs(batch.response_logprobs_T - expected).max() < 1e-3


def test_chunks_are_whole_groups_in_order() -> None:
    policy, params = tiny_policy(), SamplingParams(max_new_tokens=6)
    chunks = sample(policy, params, rows=7)
    assert [c.num_groups for c in chunks] == [2, 2]
    assert [c.num_groups for c in sample(policy, params, rows=1)] == [1, 1, 1, 1]
    joined = RolloutBatch.concatenate(chunks)
    assert joined.prompt_tokens_P.tolist() == [token for prompt in PROMPTS for token in prompt]
    assert joined.group_sizes_G.tolist() == [3, 3, 3, 3]
    assert joined.policy_version == 2


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    policy, params = tiny_policy(torch.float64), SamplingParams(max_new_tokens=24, seed=5)
    (together,) = sample(policy, params)
    apart = [sample(policy, params, [p], first=i)[0] for i, p in enumerate(PROMPTS)]
    fewer = [sample(policy, params, [p], first=i, n_samples=1)[0] for i, p in enumerate(PROMPTS)]
    assert rows_of(together) == [row for batch in apart for row in rows_of(batch)]
    assert rows_of(together)[::3] == [row for batch in fewer for row in rows_of(batch)]
    assert len({tuple(row) for row in rows_of(together)}) == 12
    assert rows_of(together) == rows_of(sample(policy, params)[0])
    assert rows_of(together) != rows_of(sample(policy, params, step=3)[0])


def test_sharing_the_prefill_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, params = tiny_policy(torch.float64), SamplingParams(max_new_tokens=12)
    (shared,) = sample(policy, params)
    monkeypatch.setattr(rollout_module, "_shared_prefill", lambda *_: {})
    (plain,) = sample(policy, params)
    assert rows_of(shared) == rows_of(plain)
    np.testing.assert_allclose(shared.response_logprobs_T, plain.response_logprobs_T, atol=1e-6)


def test_sliding_window_models_share_the_prefill_too() -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    policy = policy_of(tiny_model(**window), tiny_tokenizer())
    (batch,) = sample(policy, SamplingParams(max_new_tokens=12))
    assert np.abs(batch.response_logprobs_T - teacher_forced(policy, batch, 1.0)).max() < 1e-3


def test_every_end_token_ends_a_row_and_nothing_comes_after() -> None:
    policy = tiny_policy(ends=(END, OTHER_END, *range(3, 20)))
    assert policy.end_token_ids == (END, OTHER_END, *range(3, 20))
    (batch,) = sample(policy, SamplingParams(max_new_tokens=30), n_samples=20, rows=80)
    ends, seen = set(policy.end_token_ids), set()
    for row, finish in zip(rows_of(batch), batch.finish_N, strict=True):
        assert not ends & set(row[:-1])
        assert (row[-1] in ends) == (finish == STOPPED)
        assert finish == STOPPED or len(row) == 30
        seen.add(row[-1])
    assert len(seen & ends) > 3


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    policy = tiny_policy(ends=tuple(range(1, 100)))
    (batch,) = sample(policy, SamplingParams(max_new_tokens=1), n_samples=1)
    stopped = batch.response_tokens_T > 0
    assert (batch.finish_N == np.where(stopped, STOPPED, LENGTH)).all()
    assert batch.response_lens_N.tolist() == [1, 1, 1, 1]


def test_greedy_samples_are_equal() -> None:
    (batch,) = sample(tiny_policy(), SamplingParams(max_new_tokens=8, greedy=True, temperature=0.1))
    assert all(rows_of(batch)[i] == rows_of(batch)[i - i % 3] for i in range(12))
    assert np.abs(batch.response_logprobs_T - teacher_forced(tiny_policy(), batch, 1.0)).max() < 1e-3


def test_settings_of_the_checkpoint_do_not_change_the_distribution() -> None:
    plain, penalized = tiny_policy(), tiny_policy()
    settings = penalized.model.generation_config
    settings.repetition_penalty, settings.no_repeat_ngram_size, settings.min_new_tokens = 5.0, 1, 8
    settings.do_sample, settings.top_k, settings.temperature = True, 2, 0.1
    params = SamplingParams(max_new_tokens=10)
    assert rows_of(sample(plain, params)[0]) == rows_of(sample(penalized, params)[0])
    assert penalized.model.generation_config is settings
    assert penalized.model.training


def test_logits_that_are_not_finite_name_step_prompt_and_sample() -> None:
    policy = tiny_policy()
    with torch.no_grad():
        policy.model.model.norm.weight[0] = float("nan")
    with pytest.raises(RunError, match=r"Step 2, prompt 4, sample 0: .*not finite at token 0"):
        sample(policy, SamplingParams(max_new_tokens=3), first=4)
    assert policy.model.training


def test_an_empty_prompt_is_named() -> None:
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        sample(tiny_policy(), SamplingParams(), [[3], []])


def test_scripted_rollout_plays_its_script() -> None:
    table = {
        (4, 0): ScriptedCompletion([7, 8]), (4, 1): ScriptedCompletion([], [], LENGTH),
        (5, 0): ScriptedCompletion([1], [-2.0]), (5, 1): ScriptedCompletion([2]),
    }  # fmt: skip
    chunks = list(
        ScriptedRollout(table).generate([[1], [2]], prompt_indices=[4, 5], n_samples=2, params=SamplingParams(), step=9)
    )
    batch = RolloutBatch.concatenate(chunks)
    assert len(chunks) == 2
    assert rows_of(batch) == [[7, 8], [], [1], [2]]
    assert batch.response_logprobs_T.tolist() == [0, 0, -2, 0]
    assert batch.finish_N.tolist() == [STOPPED, LENGTH, STOPPED, STOPPED]


def test_seeded_script_repeats_itself() -> None:
    script = seeded_script(3, vocab_size=50, max_len=9, end_token_id=1)
    for sample_index in range(40):
        one, two = script(1, 2, sample_index), script(1, 2, sample_index)
        assert list(one.tokens) == list(two.tokens)
        assert 1 <= len(one.tokens) <= 9
        assert (one.tokens[-1] == 1) == (one.finish == STOPPED)
        assert 1 not in list(one.tokens[:-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_logprobs_on_cuda(dtype: torch.dtype, bound: float) -> None:
    policy = policy_of(tiny_model(dtype).to("cuda"), tiny_tokenizer())
    (batch,) = sample(policy, SamplingParams(max_new_tokens=20, top_p=0.9))
    reference = policy_of(tiny_model(dtype), tiny_tokenizer())
    assert np.abs(batch.response_logprobs_T - teacher_forced(reference, batch, 1.0)).mean() < bound
