"""Choices of decentralized optimizers, checked before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from torch.distributed.fsdp import FlatParameter

from flexcomm import InvalidArgumentError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Order", "Overlap", "check_choices", "check_not_flat"]

Order = Literal["mix-then-step", "step-then-mix"]
"""``W x - lr * d(x)``, which hides the exchange behind a whole iteration, or ``W (x - lr * d(x))``, which does not."""

Overlap = Literal["step", "backward", "none"]
"""When a bucket takes its step and leaves: in ``step()``, or in the backward pass as soon as its gradients are there;
``none`` lets nothing go on behind the computation. All give the same bits."""


def check_choices(order: str, overlap: str, max_norm: float | None) -> None:
    choices = {"order": (order, Order), "overlap": (overlap, Overlap)}
    wrong = [
        f"{name} is {value!r}, but must be one of {', '.join(get_args(choice))}"
        for name, (value, choice) in choices.items()
        if value not in get_args(choice)
    ]
    if max_norm is not None and not max_norm > 0:
        wrong.append(f"max_norm is {max_norm!r}, but must be above 0")
    if max_norm is not None and overlap == "backward":
        wrong.append(
            "max_norm needs the whole gradient before the first bucket steps, but overlap='backward' lets buckets step "
            "before it is there: use overlap='step', whose exchange hides behind the same iteration"
        )
    if wrong:
        raise InvalidArgumentError(f"{'; '.join(wrong)}.")


def check_not_flat(param: Tensor, name: str) -> None:
    """Raise for a flat parameter of FSDP1, whose memory comes and goes while it would be mixed."""
    if isinstance(param, FlatParameter):
        raise InvalidArgumentError(
            f"{name} is a flat parameter of FSDP1, which moves it in memory while it would be mixed: shard "
            f"the model by FSDP2 (fully_shard)."
        )
