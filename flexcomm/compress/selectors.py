"""Selectors: which coefficients of a chunk are sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexcomm.kernels import Selection

__all__ = ["Everything", "RandomK", "Selector", "Striding", "Threshold", "TopK", "TopRate"]


@dataclass(frozen=True)
class Everything:
    """All of them."""

    kind = Selection.EVERYTHING

    def complaints(self, most: int) -> list[str]:
        del most
        return []

    def keep(self, chunk_numel: int, chunks: int) -> int:
        del chunks
        return chunk_numel


@dataclass(frozen=True)
class TopK:
    """The ``k`` of largest magnitude of every chunk, or all of a chunk that holds fewer; of equals, the first."""

    k: int
    kind = Selection.LARGEST

    def complaints(self, most: int) -> list[str]:
        if self.k < 1:
            return [f"k is {self.k}, but at least one of every chunk must be sent"]
        return [f"k is {self.k}, but a chunk holds no more than {most}"] if self.k > most else []

    def keep(self, chunk_numel: int, chunks: int) -> int:
        del chunks
        return min(self.k, chunk_numel)


@dataclass(frozen=True)
class TopRate:
    """The share ``rate`` of every chunk that is of largest magnitude, at least one; of equals, the first."""

    rate: float
    kind = Selection.LARGEST

    def complaints(self, most: int) -> list[str]:
        del most
        return _rate_complaints("rate", self.rate)

    def keep(self, chunk_numel: int, chunks: int) -> int:
        del chunks
        return share(self.rate, chunk_numel)


@dataclass(frozen=True)
class RandomK:
    """A random share ``rate`` of every chunk, the same on every rank, without indices on the wire.

    Chunks are dealt out like cards: every coefficient is sent once before any is sent twice, in an order that follows
    from the seed, the tensor's name and the round.
    """

    rate: float
    seed: int = 0
    kind = Selection.SHUFFLED

    def complaints(self, most: int) -> list[str]:
        del most
        return _rate_complaints("rate", self.rate)

    def keep(self, chunk_numel: int, chunks: int) -> int:
        del chunks
        return share(self.rate, chunk_numel)


@dataclass(frozen=True)
class Striding:
    """Evenly spaced coefficients, the share ``rate`` of every chunk, moving on by one with every step.

    Gaps are never longer than one over the rate, rounded up, so every coefficient is sent within so many steps.
    """

    rate: float
    kind = Selection.STRIDED

    def complaints(self, most: int) -> list[str]:
        del most
        return _rate_complaints("rate", self.rate)

    def keep(self, chunk_numel: int, chunks: int) -> int:
        del chunks
        return share(self.rate, chunk_numel)


@dataclass(frozen=True)
class Threshold:
    """Every coefficient whose magnitude reaches ``tau``: as many as there are.

    At most the share ``capacity`` of the tensor is sent: if more reach ``tau``, the largest are, and the rest stays
    behind. Payloads are then equally long and need no exchange of lengths. ``None``: all are sent, whatever it takes.
    """

    tau: float
    capacity: float | None = 1 / 16
    kind = Selection.ABOVE

    def complaints(self, most: int) -> list[str]:
        del most
        wrong = [] if self.capacity is None else _rate_complaints("capacity", self.capacity)
        if not (self.tau > 0 and math.isfinite(self.tau)):
            wrong.append(f"tau is {self.tau}, but must be positive and finite")
        return wrong

    def keep(self, chunk_numel: int, chunks: int) -> int:
        return chunks * chunk_numel if self.capacity is None else share(self.capacity, chunks * chunk_numel)


Selector = Everything | TopK | TopRate | RandomK | Striding | Threshold


def share(rate: float, count: int) -> int:
    """Return how many of ``count`` a rate means: the nearest number, and never none."""
    return max(1, round(rate * count))


def _rate_complaints(name: str, rate: float) -> list[str]:
    return [] if 0 < rate <= 1 else [f"{name} is {rate}, but must be above 0 and at most 1"]
