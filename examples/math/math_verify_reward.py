"""1.0 for a completion whose final answer equals one of the row's solutions, mathematically; else 0.0.

math-verify guards itself with `signal.alarm`, so this must run on the main thread of its process.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reward_fn(record: Any) -> float:
    """Compare the last answer in `record.completion` with `record.answer`.

    A completion without a readable answer is wrong (0.0). A solution that cannot be read is not the model's fault and
    must not be learned from: it raises, and `--reward-on-error` decides.

    Raises:
        ValueError: the row has no solutions, or one that math-verify cannot parse.
    """
    solutions = [record.answer] if isinstance(record.answer, str) else list(record.answer or ())
    if not solutions:
        raise ValueError("the row has no `solutions` to compare with; see examples/math/dataset_loader.py")
    golds = [parse_gold(solution) for solution in solutions]
    answer = parse_answer(record.completion)
    return float(any(verify(gold, answer) for gold in golds))


def parse_answer(completion: str) -> list[Any]:
    """What stands in the last <answer> tags, where there are any (math-verify sees no number that ends in a tag); else
    the last answer in the text. Empty if there is nothing to read."""
    tagged = _TAGS.findall(completion)
    return list(parse(tagged[-1] if tagged else completion))


@lru_cache(maxsize=1024)
def parse_gold(solution: str) -> list[Any]:
    """A solution as math-verify's expressions. Bare LaTeX (`\\frac{1}{2}`) is only seen inside a delimiter.

    Raises:
        ValueError: there is no expression in it. Its text alone would call every other way to write it wrong.
    """
    delimited = "\\boxed{" in solution or "$" in solution
    parsed: list[Any] = parse(solution if delimited else f"\\boxed{{{solution}}}", raise_on_error=True)
    if all(isinstance(part, str) for part in parsed):
        raise ValueError(f"math-verify cannot read the solution {solution!r}; mend or remove the row")
    return parsed
