"""1.0 for the right number in the right form, `The answer is 12.`, else 0.0."""

from __future__ import annotations

import re
from typing import Any


def reward_fn(record: Any) -> float:
    said = re.fullmatch(r"The answer is (\d+)\.", record.completion.strip())
    return float(said is not None and said.group(1) in record.answer)
