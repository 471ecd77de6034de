"""How long an exchange takes: ``tau(link, k, nbytes)``, from formulas or from a measured table.

``nbytes`` is what a *node* holds of a bucket. Where a node has several ranks, each of them carries its share of it at
the same time, through the one network card of the node. ``link`` says which kind of exchange:

==============  ======================================================================================
``group``       k nodes average the bucket: 1 costs nothing, 2 swap it, more of them split it
``edges``       a node sends the bucket to, or receives it from, k others (the larger number counts)
``all-reduce``  k nodes add up the bucket
``gather``      k nodes, each of which contributes ``nbytes``, receive what all others contributed
``intra``       k ranks of one node: reduce-scatter before, all-gather after an exchange, both together
==============  ======================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

from flexdemo.runtime.errors import ModelError, check_at_least

__all__ = ["LINKS", "AlphaBeta", "LinkTable", "Links", "MeasuredLinks", "fit_alpha_beta"]

LINKS = ("group", "edges", "all-reduce", "gather", "intra")
_MANNERS = ("swap", "sum", "gather", "intra")
"""Neighbours are most alike: a time that was not measured is taken from those."""


class Links(Protocol):
    """What the recursions ask about a network."""

    def tau(self, link: str, k: int, nbytes: float) -> float:
        """Return the seconds of one exchange."""
        ...


def crossings(link: str, k: int) -> float:
    """Return how often the bucket crosses a node's cable, in the direction that carries more."""
    if link == "edges":
        return float(k)
    if k <= 1:
        return 0.0
    if link == "gather":
        return float(k - 1)
    if link == "group" and k == 2:
        return 1.0
    return 2 * (k - 1) / k


def rounds(link: str, k: int) -> int:
    """Return how many latencies an exchange takes, one after another."""
    if link == "edges":
        return min(k, 1)
    return math.ceil(math.log2(k)) if k > 1 else 0


@dataclass(frozen=True)
class AlphaBeta:
    """A latency for each round and a rate for the bytes: ``rounds * latency_s + crossings * nbytes / bytes_per_s``.

    ``bytes_per_s`` is what a node's network card carries one way while it carries as much the other way. Inside a node
    the two other figures count; by default that is free.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    intra_bytes_per_s: float = math.inf
    intra_latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "intra_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ModelError(f"got {name} = {getattr(self, name)}, needed more than 0.")
        check_at_least("latency_s", self.latency_s, 0.0)
        check_at_least("intra_latency_s", self.intra_latency_s, 0.0)

    def tau(self, link: str, k: int, nbytes: float) -> float:
        check_link(link)
        if link == "intra":
            return rounds(link, k) * self.intra_latency_s + crossings(link, k) * nbytes / self.intra_bytes_per_s
        return rounds(link, k) * self.latency_s + crossings(link, k) * nbytes / self.bytes_per_s

    def at_bandwidth(self, bytes_per_s: float) -> AlphaBeta:
        """Return the same network with another rate between nodes."""
        return replace(self, bytes_per_s=bytes_per_s)


def check_link(link: str) -> None:
    """Return when ``link`` is a kind of exchange we know."""
    if link not in LINKS:
        raise ModelError(f"got the link {link!r}, needed one of {', '.join(LINKS)}.")


@dataclass(frozen=True)
class LinkTable:
    """Measured seconds of one kind of exchange among ``k``, by ascending ``nbytes``."""

    link: str
    k: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        check_link(self.link)
        check_at_least("k", self.k, 1)
        if not self.nbytes or len(self.nbytes) != len(self.seconds):
            raise ModelError(
                f"the table of {self.link} among {self.k} has {len(self.nbytes)} sizes and {len(self.seconds)} times, "
                f"needed as many of one as of the other, and at least one."
            )
        if list(self.nbytes) != sorted(set(self.nbytes)) or self.nbytes[0] < 1:
            raise ModelError(f"got the sizes {self.nbytes}, needed whole numbers of bytes in ascending order.")
        for seconds in self.seconds:
            if not 0 < seconds < math.inf:
                raise ModelError(f"the table of {self.link} among {self.k} says {seconds} s, needed more than 0.")

    def at(self, nbytes: float) -> float:
        """Return the seconds of ``nbytes``: on the line through the two sizes around it, or the two nearest.

        Below the least size that line may fall below half the least time: latency stays, so half of it is the floor.
        """
        if len(self.nbytes) == 1:
            return self.seconds[0] * max(nbytes / self.nbytes[0], 0.5)
        place = sum(size < nbytes for size in self.nbytes[1:-1])
        (x0, x1), (y0, y1) = self.nbytes[place : place + 2], self.seconds[place : place + 2]
        slope = max((y1 - y0) / (x1 - x0), 0.0)
        return max(y0 + slope * (nbytes - x0), self.seconds[0] / 2)


def fit_alpha_beta(tables: tuple[LinkTable, ...]) -> AlphaBeta:
    """Return the formula nearest to the tables, in relative terms.

    It carries what was measured to sizes of clusters, and rates, that were not; it never replaces a measured time.
    """
    between = [table for table in tables if table.link != "intra" and table.k > 1]
    inside = [table for table in tables if table.link == "intra" and table.k > 1]
    if not between:
        raise ModelError(
            "no table measures anything between nodes: needed one of group, edges, all-reduce or gather "
            "with k of 2 or more. Measure on at least two nodes."
        )
    latency_s, bytes_per_s = _fit(between)
    intra_latency_s, intra_bytes_per_s = _fit(inside) if inside else (0.0, math.inf)
    return AlphaBeta(bytes_per_s, latency_s, intra_bytes_per_s, intra_latency_s)


def _fit(tables: list[LinkTable]) -> tuple[float, float]:
    """Return latency and rate by least squares of relative errors; a latency below zero counts as zero."""
    points = [
        (rounds(table.link, table.k) / seconds, crossings(table.link, table.k) * size / seconds)
        for table in tables
        for size, seconds in zip(table.nbytes, table.seconds, strict=True)
    ]
    aa, ab, bb = (sum(x * y for x, y in pairs) for pairs in _products(points))
    a1, b1 = sum(a for a, _ in points), sum(b for _, b in points)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        latency_s, s_per_byte = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if latency_s >= 0 and s_per_byte > 0:
            return latency_s, 1 / s_per_byte
    return 0.0, bb / b1


def _products(points: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], ...]:
    return [(a, a) for a, _ in points], [(a, b) for a, b in points], [(b, b) for _, b in points]


@dataclass(frozen=True)
class MeasuredLinks:
    """Measured tables; what they do not hold is carried over from the nearest they do hold.

    An exchange that was measured among another number of nodes, or of another kind, takes the measured time multiplied
    by the quotient of the two formulas. At another rate the same, but what the measured time exceeds the formula by is
    not multiplied: on a slower cable the work of sending stays what it is.
    """

    tables: tuple[LinkTable, ...]
    fitted: AlphaBeta = field(init=False)
    wanted: AlphaBeta | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fitted", fit_alpha_beta(self.tables))

    def tau(self, link: str, k: int, nbytes: float) -> float:
        check_link(link)
        formula_s = self.fitted.tau(link, k, nbytes)
        table = self._nearest(link, k)
        if table is None or formula_s == 0.0:
            return formula_s
        seconds = table.at(nbytes) * formula_s / self.fitted.tau(table.link, table.k, nbytes)
        if self.wanted is None:
            return seconds
        ratio, excess_s = self.wanted.tau(link, k, nbytes) / formula_s, max(seconds - formula_s, 0.0)
        return (seconds - excess_s) * ratio + excess_s * min(ratio, 1.0)

    @property
    def bytes_per_s(self) -> float:
        """The rate between nodes, by the formula that fits best."""
        return (self.wanted or self.fitted).bytes_per_s

    def at_bandwidth(self, bytes_per_s: float) -> MeasuredLinks:
        """Return the same network with another rate between nodes."""
        return replace(self, wanted=(self.wanted or self.fitted).at_bandwidth(bytes_per_s))

    def _nearest(self, link: str, k: int) -> LinkTable | None:
        """Return the table of the kind most like it, and of those the one whose number is nearest, by ratio."""
        wanted = _manner(link, k)
        known = [table for table in self.tables if (table.link == "intra") == (link == "intra")]
        known = [table for table in known if crossings(table.link, table.k) > 0]

        def distance(table: LinkTable) -> tuple[bool, int, float, int]:
            unlike = abs(_MANNERS.index(_manner(table.link, table.k)) - _MANNERS.index(wanted))
            return table.link != link or unlike > 0, unlike, abs(math.log(table.k / max(k, 1))), table.k

        return min(known, key=distance, default=None)


def _manner(link: str, k: int) -> str:
    if link in ("gather", "intra"):
        return link
    return "swap" if link == "edges" or (link == "group" and k == 2) else "sum"
