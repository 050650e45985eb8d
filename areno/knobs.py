"""What a knob is: a declared field with a help text and a check, and the form in which the command line needs it."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Union

Check = Callable[[Any], "str | None"]


def at_least(low: float) -> Check:
    """A check for numbers: finite and not below `low`."""
    return lambda v: None if math.isfinite(v) and v >= low else f"must be at least {low:g}"


def above(low: float) -> Check:
    """A check for numbers: finite and greater than `low`."""
    return lambda v: None if math.isfinite(v) and v > low else f"must be greater than {low:g}"


def within(low: float, high: float) -> Check:
    """A check for numbers: low < value <= high."""
    return lambda v: None if low < v <= high else f"must be greater than {low:g} and at most {high:g}"


def fraction(v: float) -> str | None:
    """A check for decay rates: 0 <= value < 1."""
    return None if 0 <= v < 1 else "must be at least 0 and below 1"


def share(v: float) -> str | None:
    """A check for shares of a whole: 0 <= value <= 1."""
    return None if 0 <= v <= 1 else "must be at least 0 and at most 1"


def positive_or_off(v: int) -> str | None:
    return None if v == -1 or v >= 1 else "must be at least 1, or -1 to turn it off"


def knob(default: Any = dataclasses.MISSING, *, help: str, check: Check | None = None, metavar: str = "") -> Any:
    """Declare one option. `help` says what it does and, where the name does not tell, its unit."""
    metadata = {"help": help, "check": check, "metavar": metavar}
    if default is dataclasses.MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Knob:
    """One declared option as the command line needs it."""

    section: str
    group: str
    name: str
    type: type
    choices: tuple[str, ...]
    optional: bool
    required: bool
    default: Any
    help: str
    metavar: str
    check: Check | None

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    def problem(self, value: Any) -> str | None:
        """A sentence about a value that cannot work, or None."""
        said = self.check(value) if self.check is not None and value is not None else None
        return None if said is None else f"{self.option} {said}, got {value}."


def resolve(hint: Any) -> tuple[type, tuple[str, ...], bool]:
    """Split an annotation into (plain type, choices, optional)."""
    optional = False
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (a for a in typing.get_args(hint) if a is not type(None))
        optional = True
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint), optional
    return hint, (), optional
