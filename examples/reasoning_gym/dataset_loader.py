"""Any task of the reasoning-gym package, made on the fly.

    --dataset-path reasoning_gym:gsm_symbolic
    --dataset-path 'reasoning_gym:basic_arithmetic?size=2000&seed=7&max_terms=4'

`size` and `seed` say which problems; other options are the task's own.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl

import reasoning_gym
from reasoning_gym.factory import DATASETS

INSTRUCTION = "Think step by step, then give only the final answer between <answer> and </answer>."


def load_training_dataset(
    dataset_path: str,
    *,
    default_loader: object = None,  # noqa: ARG001  (the problems are made here, nothing is read)
    size: int = 1000,
    seed: int = 0,
    **task_options: Any,
) -> list[dict[str, Any]]:
    """Rows with `prompt` (chat messages), `solutions`, and `reasoning_gym`: how reward.py makes the same problem again.

    Raises:
        ValueError: the path is not reasoning_gym:TASK, or the package has no such task.
    """
    kind, _, rest = dataset_path.partition(":")
    task, _, query = rest.partition("?")
    if kind != "reasoning_gym" or not task:
        raise ValueError(f"expected reasoning_gym:TASK, got {dataset_path!r}")
    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}; it has {', '.join(sorted(DATASETS))}")
    options = {"size": size, "seed": seed, **task_options, **{key: _value(text) for key, text in parse_qsl(query)}}
    problems = reasoning_gym.create_dataset(task, **options)
    return [
        {
            "prompt": [{"role": "user", "content": f"{problem['question']}\n\n{INSTRUCTION}"}],
            "solutions": None if problem["answer"] is None else [str(problem["answer"])],
            "reasoning_gym": {"task": task, "options": options, "index": index},
        }
        for index, problem in enumerate(problems)
    ]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
