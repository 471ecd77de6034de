"""Settings of the optimizers: what each may be, checked group by group before anything is exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from flexcomm import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexdemo.parameters import Group

__all__ = ["Outer", "Sent", "Update", "check_every", "check_group", "check_sent"]

Sent = Literal["gradients", "steps"]
"""What nodes send each other: gradients, from which all take the same step, or what each moved by a step of its own."""

Update = Literal["sign", "plain"]
"""What becomes of the decoded momentum: its sign times the learning rate, or itself."""


@dataclass(frozen=True)
class Outer:
    """How nodes move together after local steps: SGD on the averaged difference, as DiLoCo does (arXiv 2311.08105).

    ``Outer(lr=1.0, momentum=0.0)`` is the plain average.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (self.lr > 0 and 0 <= self.momentum < 1):
            raise InvalidArgumentError(f"{self}: lr must be above 0, and momentum at least 0 and below 1.")


_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda value: value >= 0, "at least 0"),
    "decay": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "weight_decay": (lambda value: value >= 0, "at least 0"),
    "alpha": (lambda value: 0 < value <= 1, "above 0, at most 1"),
    "exchange_decay": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "exchange_alpha": (lambda value: 0 < value <= 1, "above 0, at most 1"),
}


_THEIRS = frozenset({"decay", "alpha"})
"""What a group of torch's own optimizers may mean something else by."""


def check_group(group: Group) -> None:
    """Raise unless a parameter group's settings make sense."""
    wrong = [
        f"{name} is {group[name]!r}, but must be {needed}"
        for name, (allows, needed) in _RULES.items()
        if name in group and not (name in _THEIRS and "exchange_alpha" in group) and not allows(float(group[name]))
    ]
    if "update" in group and group["update"] not in get_args(Update):
        wrong.append(f"update is {group['update']!r}, but must be one of {', '.join(get_args(Update))}")
    if not hasattr(group["compressor"], "plan"):
        wrong.append(f"compressor is {group['compressor']!r}, but must be one, such as flexcomm.demo()")
    if wrong:
        raise InvalidArgumentError(f"{'; '.join(wrong)}.")


def check_every(exchange_every: object) -> None:
    if not isinstance(exchange_every, int) or exchange_every < 1:
        raise InvalidArgumentError(f"exchange_every is {exchange_every!r}, but must be a whole number, at least 1.")


def check_sent(exchange: str) -> None:
    if exchange not in get_args(Sent):
        raise InvalidArgumentError(f"exchange is {exchange!r}, but must be one of {', '.join(get_args(Sent))}.")
