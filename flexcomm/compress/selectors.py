"""Selectors: which coefficients of a chunk are sent."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from flexcomm.compress.settings import SHARE, WHOLE, Settings, rule
from flexcomm.kernels import Selection

if TYPE_CHECKING:
    from flexcomm.compress.bases import Cut

__all__ = ["Everything", "RandomK", "Selector", "Striding", "Threshold", "TopK", "TopRate"]

_POSITIVE = rule(int, "a whole number, at least 1", lambda count: count >= 1)
_CAPACITY = rule(float, "a number above 0 and at most 1, or None", lambda share: 0 < share <= 1, optional=True)
_TAU = rule(
    float,
    "positive and finite as a float32: a number from 1.5e-45 to 3.4e+38",
    lambda tau: 0 < float(torch.tensor(tau, dtype=torch.float32)) < math.inf,
)


@dataclass(frozen=True)
class Selector(Settings, ABC):
    """Settings that say which coefficients of a chunk are sent; a base for frozen dataclasses.

    Attributes:
        selection: how the kernels select.
        tau, seed, variable_length: what the plan's fields of the same names are; settings of those that have them.

    """

    selection: ClassVar[Selection]
    tau = 0.0
    seed = 0

    @property
    def variable_length(self) -> bool:
        return False

    @abstractmethod
    def choose_k(self, cut: Cut) -> int:
        """Return the plan's ``k`` for a tensor that is cut like this."""


@dataclass(frozen=True)
class Everything(Selector):
    """All of them."""

    selection = Selection.EVERYTHING

    def choose_k(self, cut: Cut) -> int:
        return cut.chunk_numel


@dataclass(frozen=True)
class TopK(Selector):
    """The ``k`` of largest magnitude of every chunk, or all of a chunk that holds fewer; of equals, the first."""

    k: int = field(metadata=_POSITIVE)
    selection = Selection.LARGEST

    def choose_k(self, cut: Cut) -> int:
        return min(self.k, cut.chunk_numel)


@dataclass(frozen=True)
class _Rated(Selector):
    """A share of every chunk: the nearest number, at least one."""

    rate: float = field(metadata=SHARE)

    def choose_k(self, cut: Cut) -> int:
        return _share(self.rate, cut.chunk_numel)


@dataclass(frozen=True)
class TopRate(_Rated):
    """The share ``rate`` of every chunk that is of largest magnitude, at least one; of equals, the first."""

    selection = Selection.LARGEST


@dataclass(frozen=True)
class RandomK(_Rated):
    """A random share ``rate`` of every chunk, the same on every rank, without indices on the wire.

    Chunks are dealt out like cards: every coefficient is sent once before any is sent twice, in an order that follows
    from the seed, the tensor's name and the round.
    """

    seed: int = field(default=0, metadata=WHOLE)
    selection = Selection.SHUFFLED


@dataclass(frozen=True)
class Striding(_Rated):
    """Evenly spaced coefficients, the share ``rate`` of every chunk, moving on by one with every step.

    Gaps are never longer than one over the rate, rounded up, so every coefficient is sent within so many steps.
    """

    selection = Selection.STRIDED


@dataclass(frozen=True)
class Threshold(Selector):
    """Every coefficient whose magnitude reaches ``tau``: as many as there are.

    At most the share ``capacity`` of the tensor is sent: if more reach ``tau``, the largest are, of those about as
    large the first, and the rest stays behind. Payloads are then equally long and need no exchange of lengths.
    ``None``: all are sent, whatever it takes.
    """

    tau: float = field(metadata=_TAU)
    capacity: float | None = field(default=1 / 16, metadata=_CAPACITY)
    selection = Selection.ABOVE

    @property
    def variable_length(self) -> bool:
        return self.capacity is None

    def choose_k(self, cut: Cut) -> int:
        whole = cut.chunks * cut.chunk_numel
        return whole if self.capacity is None else _share(self.capacity, whole)


def _share(rate: float, count: int) -> int:
    """Return how many of ``count`` a rate means: the nearest number, and never none."""
    return max(1, round(rate * count))
