"""Settings of the optimizers: what each may be, checked group by group before anything is exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from flexcomm import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexdemo.parameters import Group

__all__ = ["OuterOptimizer", "SyncTarget", "Update", "check_group", "check_sync_every", "check_sync_target"]

SyncTarget = Literal["gradients", "steps"]
"""What nodes send each other: gradients, from which all take the same step, or what each moved by a step of its own."""

Update = Literal["sign", "plain"]
"""What becomes of the decoded momentum: its sign times the learning rate, or itself."""


@dataclass(frozen=True)
class OuterOptimizer:
    """How nodes move together after local steps: SGD on the averaged difference, as DiLoCo does (arXiv 2311.08105).

    Args:
        lr: the learning rate; 1.0 without momentum is the plain average.
        momentum: of the averaged differences.
        nesterov: whether the momentum is Nesterov's.

    Example:
        >>> import flexdemo
        >>> flexdemo.OuterOptimizer(lr=1.0, momentum=0.0)
        OuterOptimizer(lr=1.0, momentum=0.0, nesterov=True)

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
    "residual_decay": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "residual_alpha": (lambda value: 0 < value <= 1, "above 0, at most 1"),
}


_THEIRS = frozenset({"decay", "alpha"})
"""What a group of torch's own optimizers may mean something else by."""


def check_group(group: Group) -> None:
    """Raise unless a parameter group's settings make sense."""
    wrong = [
        f"{name} is {group[name]!r}, but must be {needed}"
        for name, (allows, needed) in _RULES.items()
        if name in group and not (name in _THEIRS and "residual_alpha" in group) and not allows(float(group[name]))
    ]
    if "update" in group and group["update"] not in get_args(Update):
        wrong.append(f"update is {group['update']!r}, but must be one of {', '.join(get_args(Update))}")
    if not hasattr(group["compressor"], "plan"):
        wrong.append(f"compressor is {group['compressor']!r}, but must be one, such as flexcomm.demo()")
    if wrong:
        raise InvalidArgumentError(f"{'; '.join(wrong)}.")


def check_sync_every(sync_every: object) -> None:
    if not isinstance(sync_every, int) or sync_every < 1:
        raise InvalidArgumentError(f"sync_every is {sync_every!r}, but must be a whole number, at least 1.")


def check_sync_target(sync: str) -> None:
    if sync not in get_args(SyncTarget):
        raise InvalidArgumentError(f"sync is {sync!r}, but must be one of {', '.join(get_args(SyncTarget))}.")
