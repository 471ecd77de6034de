"""Time of an exchange, ``tau(link, k, nbytes)``: from a formula, or from measured tables.

``nbytes`` is what a *node* holds of a bucket. Where a node has several ranks, each carries its share of these bytes at
the same time, through the node's one network card. ``link`` is the type of exchange:

==============  ==========================================================================================
``group``       k nodes average the bucket: 1 sends nothing, 2 send it to each other, more reduce-scatter
                and all-gather it
``edges``       a node sends the bucket to k others, or receives k buckets (the larger number counts)
``all-reduce``  k nodes all-reduce the bucket
``gather``      all-gather among k nodes, each of which contributes ``nbytes``
``intra``       k ranks of one node: the reduce-scatter before and the all-gather after an inter-node exchange
==============  ==========================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

from flexcomm import InvalidArgumentError

LINKS = ("group", "edges", "all-reduce", "gather", "intra")


class Links(Protocol):
    """A network, as far as the simulations need it."""

    def tau(self, link: str, k: int, nbytes: float) -> float:
        """Return the seconds of one exchange of type ``link`` among ``k``, of ``nbytes`` per node."""
        ...


def crossings(link: str, k: int) -> float:
    """Return the bytes through a node's card per byte of the bucket, in the direction that carries more."""
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
    """Return the number of message latencies that follow each other in an exchange."""
    if link == "edges":
        return min(k, 1)
    return math.ceil(math.log2(k)) if k > 1 else 0


def _check_link(link: str) -> None:
    if link not in LINKS:
        raise InvalidArgumentError(f"got the link {link!r}, needed one of {', '.join(LINKS)}.")


@dataclass(frozen=True)
class AlphaBeta:
    """The alpha-beta model: ``rounds * latency_s + crossings * nbytes / bytes_per_s``.

    Args:
        bytes_per_s: rate of a node's network card in one direction, while it carries as much in the other.
        latency_s: latency of a message between nodes.
        intra_bytes_per_s: the rate inside a node; infinite by default.
        intra_latency_s: the latency inside a node.

    """

    bytes_per_s: float
    latency_s: float = 0.0
    intra_bytes_per_s: float = math.inf
    intra_latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "intra_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(f"got {name} = {getattr(self, name)}, needed more than 0.")
        check_at_least("latency_s", self.latency_s, 0.0)
        check_at_least("intra_latency_s", self.intra_latency_s, 0.0)

    def tau(self, link: str, k: int, nbytes: float) -> float:
        """Return the seconds of one exchange; see :class:`Links`."""
        _check_link(link)
        if link == "intra":
            return rounds(link, k) * self.intra_latency_s + crossings(link, k) * nbytes / self.intra_bytes_per_s
        return rounds(link, k) * self.latency_s + crossings(link, k) * nbytes / self.bytes_per_s

    def at_bandwidth(self, bytes_per_s: float) -> AlphaBeta:
        """Return the same network with another rate between nodes."""
        return replace(self, bytes_per_s=bytes_per_s)


@dataclass(frozen=True)
class LinkTable:
    """Measured seconds of one type of exchange.

    Args:
        link: type of exchange, one of ``LINKS``.
        k: number of nodes that took part; for ``intra`` the ranks of a node, for ``edges`` the peers of a node.
        nbytes: the sizes that were measured, ascending, each that of a node.
        seconds: the time of each size.

    """

    link: str
    k: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_link(self.link)
        check_at_least("k", self.k, 1)
        if not self.nbytes or len(self.nbytes) != len(self.seconds):
            raise InvalidArgumentError(
                f"the table of {self.link} among {self.k} has {len(self.nbytes)} sizes and {len(self.seconds)} times, "
                f"needed as many of one as of the other, and at least one."
            )
        if list(self.nbytes) != sorted(set(self.nbytes)) or self.nbytes[0] < 1:
            raise InvalidArgumentError(
                f"got the sizes {self.nbytes}, needed whole numbers of bytes in ascending order."
            )
        for seconds in self.seconds:
            if not 0 < seconds < math.inf:
                raise InvalidArgumentError(
                    f"the table of {self.link} among {self.k} says {seconds} s, needed more than 0."
                )

    def at(self, nbytes: float) -> float:
        """Return the seconds of ``nbytes``, interpolated linearly, or extrapolated from the two nearest sizes.

        Latency does not shrink with the size, so the result is never below half the smallest measured time.
        """
        if len(self.nbytes) == 1:
            return self.seconds[0] * max(nbytes / self.nbytes[0], 0.5)
        place = sum(size < nbytes for size in self.nbytes[1:-1])
        (x0, x1), (y0, y1) = self.nbytes[place : place + 2], self.seconds[place : place + 2]
        slope = max((y1 - y0) / (x1 - x0), 0.0)
        return max(y0 + slope * (nbytes - x0), self.seconds[0] / 2)


def fit_alpha_beta(tables: tuple[LinkTable, ...]) -> AlphaBeta:
    """Return the alpha-beta model with the least squared relative error over ``tables``.

    It extrapolates measured times to other numbers of nodes and other rates; it never replaces a measured time.

    """
    inter = [table for table in tables if table.link != "intra" and table.k > 1]
    intra = [table for table in tables if table.link == "intra" and table.k > 1]
    if not inter:
        raise InvalidArgumentError(
            "no table measures anything between nodes: needed one of group, edges, all-reduce or gather "
            "with k of 2 or more. Measure on at least two nodes."
        )
    latency_s, bytes_per_s = _fit(inter)
    intra_latency_s, intra_bytes_per_s = _fit(intra) if intra else (0.0, math.inf)
    return AlphaBeta(bytes_per_s, latency_s, intra_bytes_per_s, intra_latency_s)


def _fit(tables: list[LinkTable]) -> tuple[float, float]:
    """Return latency and rate by least squares of relative errors; a negative latency counts as zero."""
    points = [
        (rounds(table.link, table.k) / seconds, crossings(table.link, table.k) * size / seconds)
        for table in tables
        for size, seconds in zip(table.nbytes, table.seconds, strict=True)
    ]
    # The normal equations of a * latency_s + b * s_per_byte = 1.
    aa, ab, bb = sum(a * a for a, _ in points), sum(a * b for a, b in points), sum(b * b for _, b in points)
    a1, b1 = sum(a for a, _ in points), sum(b for _, b in points)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        latency_s, s_per_byte = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if latency_s >= 0 and s_per_byte > 0:
            return latency_s, 1 / s_per_byte
    return 0.0, bb / b1


_PATTERNS = ("send_recv", "all-reduce", "gather", "intra")
"""Communication patterns, each next to those most like it."""


def _pattern(link: str, k: int) -> str:
    if link in ("gather", "intra"):
        return link
    return "send_recv" if link == "edges" or (link == "group" and k == 2) else "all-reduce"


@dataclass(frozen=True)
class MeasuredLinks:
    """Measured tables, extrapolated by the alpha-beta model where they do not apply.

    An exchange that was not measured takes the time of the table most like it, multiplied by the ratio of the two
    formulas. At another rate that ratio applies, on a slower network, only to the part of a time that the formula
    explains: the rest is work of the hosts, which does not depend on the network.

    Args:
        tables: what was measured; at least one table must be of an exchange between nodes.
        requested: the alpha-beta model at another rate than the measured one; set by :meth:`at_bandwidth`.

    """

    tables: tuple[LinkTable, ...]
    fitted: AlphaBeta = field(init=False)
    requested: AlphaBeta | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fitted", fit_alpha_beta(self.tables))

    def tau(self, link: str, k: int, nbytes: float) -> float:
        """Return the seconds of one exchange; see :class:`Links`."""
        _check_link(link)
        formula_s = self.fitted.tau(link, k, nbytes)
        table = self._nearest(link, k)
        if table is None or formula_s == 0.0:
            return formula_s
        seconds = table.at(nbytes) * formula_s / self.fitted.tau(table.link, table.k, nbytes)
        if self.requested is None:
            return seconds
        ratio, excess_s = self.requested.tau(link, k, nbytes) / formula_s, max(seconds - formula_s, 0.0)
        return (seconds - excess_s) * ratio + excess_s * min(ratio, 1.0)

    @property
    def bytes_per_s(self) -> float:
        """The rate between nodes in the fitted, or the requested, alpha-beta model."""
        return (self.requested or self.fitted).bytes_per_s

    def at_bandwidth(self, bytes_per_s: float) -> MeasuredLinks:
        """Return the same network with another rate between nodes."""
        return replace(self, requested=(self.requested or self.fitted).at_bandwidth(bytes_per_s))

    def _nearest(self, link: str, k: int) -> LinkTable | None:
        """Return the table with the most similar pattern and, among those, the nearest k by ratio."""
        pattern = _PATTERNS.index(_pattern(link, k))
        known = [table for table in self.tables if (table.link == "intra") == (link == "intra")]
        known = [table for table in known if crossings(table.link, table.k) > 0]

        def distance(table: LinkTable) -> tuple[bool, int, float, int]:
            unlike = abs(_PATTERNS.index(_pattern(table.link, table.k)) - pattern)
            return table.link != link or unlike > 0, unlike, abs(math.log(table.k / max(k, 1))), table.k

        return min(known, key=distance, default=None)


def check_at_least(name: str, number: float, least: float) -> None:
    """Raise unless ``number`` is ``least`` or more; NaN is not."""
    if not number >= least:
        raise InvalidArgumentError(f"got {name} = {number}, needed {least} or more.")


def check_between(name: str, number: float, least: float, most: float) -> None:
    """Raise unless ``number`` lies in [``least``, ``most``]; NaN does not."""
    if not least <= number <= most:
        raise InvalidArgumentError(f"got {name} = {number}, needed a number between {least} and {most}.")
