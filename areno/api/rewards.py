"""What a reward function is given, and the one-group form of the advantage formula."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from areno.api.advantages import compute_batch_group_advantages


def compute_group_advantages(rewards: Any, eps: float = 1e-8) -> list[float]:
    """Advantages of one prompt group: `(r - mean) / (std + eps)`, population std; equal rewards give exactly 0.0.

    Raises:
        ValueError: a reward is NaN or infinite.
    """
    advantages: list[float] = compute_batch_group_advantages(rewards, [len(rewards)], eps=eps).tolist()
    return advantages


@dataclass(frozen=True, slots=True)
class TokenView:
    """Per-token data of one row as array views, turned into lists only when a reward function reads them."""

    prompt_tokens: npt.NDArray[np.int32]
    response_tokens: npt.NDArray[np.int32]
    response_logprobs: npt.NDArray[np.float32]
    loss_mask: npt.NDArray[np.bool_] | None = None


class RewardRecord:
    """One completion to be scored.

    prompt, completion   the texts
    answer               the data set row's solutions (list of str) or None
    tokens               prompt and response ids; logprobs and loss_mask have one entry each (0.0 and False on the prompt)
    source_record        the data set row
    metadata             prompt_index and sample_index, the places in the step's batch
    messages, trace, tool_calls, tool_results: empty unless the rollout had turns

    `tokens`, `logprobs`, `loss_mask`, `answer` and `source_record` are made on first reading and belong to this record
    alone: what one call does to them cannot reach another.
    """

    __slots__ = (
        "_answer", "_lists", "_source_record", "_view", "completion", "final_answer", "messages", "metadata", "prompt",
        "rendered_completion", "tool_calls", "tool_results", "trace",
    )  # fmt: skip

    def __init__(
        self,
        prompt: str,
        completion: str,
        *,
        answer: Any = None,
        tokens: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        loss_mask: Sequence[bool] = (),
        source_record: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        view: TokenView | None = None,
    ) -> None:
        self.prompt = prompt
        self.completion = completion
        self.rendered_completion = completion
        self.final_answer = completion
        self.metadata = {} if metadata is None else metadata
        self.messages: list[Any] = []
        self.trace: list[Any] = []
        self.tool_calls: list[Any] = []
        self.tool_results: list[Any] = []
        self._answer = (answer, False)
        self._source_record = ({} if source_record is None else source_record, False)
        self._view = view
        self._lists: dict[str, list[Any]] = {}
        if view is None:
            self._lists = {"tokens": list(tokens), "logprobs": list(logprobs), "loss_mask": list(loss_mask)}

    @property
    def answer(self) -> Any:
        value, own = self._answer
        if not own:
            self._answer = (value, own) = (copy.deepcopy(value), True)
        return value

    @property
    def source_record(self) -> dict[str, Any]:
        value, own = self._source_record
        if not own:
            self._source_record = (value, own) = (copy.deepcopy(value), True)
        return value

    @property
    def tokens(self) -> list[int]:
        return self._list("tokens")

    @property
    def logprobs(self) -> list[float]:
        return self._list("logprobs")

    @property
    def loss_mask(self) -> list[bool]:
        return self._list("loss_mask")

    def _list(self, name: str) -> list[Any]:
        made = self._lists.get(name)
        if made is None:
            assert self._view is not None
            made = self._lists[name] = _read(self._view, name)
        return made

    def __repr__(self) -> str:
        return f"RewardRecord(prompt={self.prompt!r}, completion={self.completion!r}, metadata={self.metadata!r})"


def _read(view: TokenView, name: str) -> list[Any]:
    prompt, response = view.prompt_tokens, view.response_tokens
    if name == "tokens":
        return [*prompt.tolist(), *response.tolist()]
    if name == "logprobs":
        return [0.0] * prompt.size + list(view.response_logprobs.tolist())
    own = [True] * response.size if view.loss_mask is None else view.loss_mask.tolist()
    return [False] * prompt.size + own
