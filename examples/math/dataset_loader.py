"""Math problems as chat prompts: GSM8K, NuminaMath, and rows that are in the right form already.

    --dataset-path gsm8k:main          question, answer (ends in `#### 72`)
    --dataset-path AI-MO/NuminaMath-CoT   problem, solution (holds `\\boxed{...}`)
    --dataset-path my.jsonl            prompt, solutions
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def load_training_dataset(
    dataset_path: str, *, default_loader: Callable[[str], Iterable[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Rows with `prompt` (chat messages) and `solutions` (the final answers that count as right).

    Raises:
        ValueError: a row is of none of the three kinds. Rows of NuminaMath without a final answer (proofs) are left out.
    """
    rows = (normalize(dict(row), number) for number, row in enumerate(default_loader(dataset_path), start=1))
    return [row for row in rows if row is not None]


def normalize(row: dict[str, Any], number: int) -> dict[str, Any] | None:
    """One raw row in the common form, or None for a problem without a final answer."""
    if "prompt" in row and "solutions" in row:
        return row
    if "question" in row and "answer" in row:
        problem, gold = row["question"], gsm8k_answer(row["answer"], number)
    elif "problem" in row and "solution" in row:
        problem, gold = row["problem"], last_boxed(row["solution"])
    else:
        raise ValueError(
            f"row {number} has the columns {', '.join(row)}; expected question and answer, problem and solution, "
            f"or prompt and solutions"
        )
    if gold is None:
        return None
    return {"prompt": [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"}], "solutions": [gold]}


def gsm8k_answer(answer: str, number: int) -> str:
    """What follows the last `####`, without thousands separators."""
    _, mark, gold = answer.rpartition("####")
    if not mark or not gold.strip():
        raise ValueError(f"row {number}: the answer does not end in `#### <number>`: {answer[-60:]!r}")
    return gold.strip().replace(",", "")


def last_boxed(solution: str) -> str | None:
    """Content of the last `\\boxed{...}`, braces matched; None if there is none that closes."""
    start = solution.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for end in range(begin, len(solution)):
        escaped = solution[end - 1] == "\\" and solution[end - 2 : end] != "\\\\"
        if solution[end] in "{}" and not escaped:
            depth += 1 if solution[end] == "{" else -1
        if depth == 0:
            return solution[begin:end].strip() or None
    return None
