"""The task's own score, 0 to 1, of what stands between the last <answer> and </answer>."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer


def reward_fn(record: Any) -> float:
    """Score `record.completion` with the scorer of the row's task. Without answer tags it gets what no answer gets.

    Raises:
        KeyError: the row was not made by the loader beside this file.
    """
    origin = record.source_record["reasoning_gym"]
    problems = _problems(origin["task"], json.dumps(origin["options"], sort_keys=True))
    problem = _problem(problems, origin["index"])
    return float(problems.score_answer(extract_answer(record.completion), problem))


@lru_cache(maxsize=8)
def _problems(task: str, options: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(options))


@lru_cache(maxsize=1024)
def _problem(problems: Any, index: int) -> Any:
    """The problem in full. It is made again from its seed and not carried in the row: some tasks keep tuples and
    objects in it that do not survive JSON or Arrow, and their scorers need them as they were."""
    return problems[index]
