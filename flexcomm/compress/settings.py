"""Settings: numbers of any kind become Python's own, so that equal ones compare, hash and print alike.

What cannot be one is left as it is, to be named later: a compressor lists everything that is wrong with it at once.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["SHARE", "WHOLE", "Rule", "Settings", "rule"]


@dataclass(frozen=True)
class Rule:
    """Which numbers a setting may be, and the same in words that follow "must be"."""

    kind: type[int] | type[float]
    needed: str
    allows: Callable[[float], bool]
    optional: bool = False

    def plain(self, value: object) -> object:
        """Return the number as the setting's kind; anything else as it is."""
        if isinstance(value, bool):
            return value
        if self.kind is int and isinstance(value, Integral):
            return int(value)
        if self.kind is float and isinstance(value, Real):
            with suppress(OverflowError):
                return float(value)
        return value

    def is_kept_by(self, value: object) -> bool:
        if value is None:
            return self.optional
        return type(value) is self.kind and self.allows(value)


@dataclass(frozen=True)
class Settings:
    """A base for frozen dataclasses whose fields each have a rule."""

    def __post_init__(self) -> None:
        for name, one in self._rules().items():
            object.__setattr__(self, name, one.plain(getattr(self, name)))

    def complaints(self) -> list[str]:
        """Return what is wrong, setting by setting."""
        return [
            f"{name} is {getattr(self, name)!r}, but must be {one.needed}"
            for name, one in self._rules().items()
            if not one.is_kept_by(getattr(self, name))
        ]

    def _rules(self) -> dict[str, Rule]:
        return {field.name: field.metadata["rule"] for field in fields(self)}


def rule(
    kind: type[int] | type[float], needed: str, allows: Callable[[float], bool], *, optional: bool = False
) -> Mapping[str, Rule]:
    """Return a rule as a field's metadata."""
    return {"rule": Rule(kind, needed, allows, optional)}


WHOLE = rule(int, "a whole number", lambda _: True)
SHARE = rule(float, "a number above 0 and at most 1", lambda share: 0 < share <= 1)
