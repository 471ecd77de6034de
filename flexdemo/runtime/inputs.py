"""The inputs of a simulation: links with the times of their exchanges, cluster, workload, costs of compression.

Bytes are those of a *node*, whose ranks share them and the node's one network card. docs/runtime-model.md describes
each type of exchange, one of ``LINKS``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexcomm import InvalidArgumentError

LINKS = ("group", "edges", "all-reduce", "gather", "intra")


def check_range(least: float, most: float = math.inf, /, **numbers: float | tuple[float, ...]) -> None:
    """Raise unless all ``numbers`` lie in [``least``, ``most``]; NaN does not."""
    for name, value in numbers.items():
        for number in value if isinstance(value, tuple) else (value,):
            if not least <= number <= most:
                needed = f"{least} or more" if math.isinf(most) else f"a number between {least} and {most}"
                raise InvalidArgumentError(f"got {name} = {number}, needed {needed}.")


# Links


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
    return float(k - 1) if link == "gather" else 2 * (k - 1) / k


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

    ``bytes_per_s`` is the rate of a node's network card in one direction, while it carries as much in the other. Rate
    and latency inside a node begin with ``intra_``.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    intra_bytes_per_s: float = math.inf
    intra_latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "intra_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(f"got {name} = {getattr(self, name)}, needed more than 0.")
        check_range(0.0, latency_s=self.latency_s, intra_latency_s=self.intra_latency_s)

    def tau(self, link: str, k: int, nbytes: float) -> float:
        _check_link(link)
        if link == "intra":
            return rounds(link, k) * self.intra_latency_s + crossings(link, k) * nbytes / self.intra_bytes_per_s
        return rounds(link, k) * self.latency_s + crossings(link, k) * nbytes / self.bytes_per_s

    def at_bandwidth(self, bytes_per_s: float) -> AlphaBeta:
        """Return the same network with another rate between nodes."""
        return replace(self, bytes_per_s=bytes_per_s)


@dataclass(frozen=True)
class LinkTable:
    """Measured seconds of one type of exchange, for each of ``nbytes``, ascending.

    ``k`` is the number of nodes that took part, for ``intra`` the ranks of a node, for ``edges`` the peers of a node.
    """

    link: str
    k: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_link(self.link)
        check_range(1, k=self.k)
        table, sizes, times = f"the table of {self.link} among {self.k}", len(self.nbytes), len(self.seconds)
        if not 0 < sizes == times:
            raise InvalidArgumentError(f"{table} has {sizes} sizes and {times} times, needed as many, at least one.")
        if list(self.nbytes) != sorted(set(self.nbytes)) or self.nbytes[0] < 1:
            raise InvalidArgumentError(f"{table} has sizes {self.nbytes}, needed bytes from 1 in ascending order.")
        for seconds in self.seconds:
            if not 0 < seconds < math.inf:
                raise InvalidArgumentError(f"{table} says {seconds} s, needed more than 0.")

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


def _fit(tables: list[LinkTable]) -> tuple[float, float]:
    """Return latency and rate by least squares of relative errors; a negative latency counts as zero."""
    points = np.array(
        [
            (rounds(table.link, table.k) / seconds, crossings(table.link, table.k) * size / seconds)
            for table in tables
            for size, seconds in zip(table.nbytes, table.seconds, strict=True)
        ]
    )
    # Columns of one length, so that the rank does not depend on their units.
    lengths = np.linalg.norm(points, axis=0)
    solution, _, rank, _ = np.linalg.lstsq(points / lengths, np.ones(len(points)), rcond=1e-6)
    latency_s, s_per_byte = (solution / lengths).tolist()
    if rank > 1 and latency_s >= 0 and s_per_byte > 0:
        return latency_s, 1 / s_per_byte
    per_byte = points[:, 1]
    return 0.0, float(per_byte @ per_byte / per_byte.sum())


@dataclass(frozen=True)
class MeasuredLinks:
    """Measured tables, extrapolated by the alpha-beta model where they do not apply.

    An exchange that was not measured takes the time of the table most like it, multiplied by the ratio of the two
    formulas. At another rate that ratio applies, on a slower network, only to the part of a time that the formula
    explains: the rest is work of the hosts, which does not depend on the network. :meth:`at_bandwidth` sets
    ``requested``, the model at another rate.
    """

    tables: tuple[LinkTable, ...]
    fitted: AlphaBeta = field(init=False)
    requested: AlphaBeta | None = None

    def __post_init__(self) -> None:
        inter = [table for table in self.tables if table.link != "intra" and table.k > 1]
        intra = [table for table in self.tables if table.link == "intra" and table.k > 1]
        if not inter:
            raise InvalidArgumentError("no table is of two nodes or more, needed one. Measure on at least two nodes.")
        latency_s, bytes_per_s = _fit(inter)
        intra_latency_s, intra_bytes_per_s = _fit(intra) if intra else (0.0, math.inf)
        object.__setattr__(self, "fitted", AlphaBeta(bytes_per_s, latency_s, intra_bytes_per_s, intra_latency_s))

    @property
    def bytes_per_s(self) -> float:
        """The rate between nodes in the fitted, or the requested, alpha-beta model."""
        return (self.requested or self.fitted).bytes_per_s

    def at_bandwidth(self, bytes_per_s: float) -> MeasuredLinks:
        """Return the same network with another rate between nodes."""
        return replace(self, requested=(self.requested or self.fitted).at_bandwidth(bytes_per_s))

    def tau(self, link: str, k: int, nbytes: float) -> float:
        formula_s = self.fitted.tau(link, k, nbytes)
        table = self._nearest(link, k)
        if table is None or formula_s == 0.0:
            return formula_s
        seconds = table.at(nbytes) * formula_s / self.fitted.tau(table.link, table.k, nbytes)
        if self.requested is None:
            return seconds
        ratio, excess_s = self.requested.tau(link, k, nbytes) / formula_s, max(seconds - formula_s, 0.0)
        return (seconds - excess_s) * ratio + excess_s * min(ratio, 1.0)

    def _nearest(self, link: str, k: int) -> LinkTable | None:
        """Return the table with the most similar pattern and, among those, the nearest k by ratio."""
        known = [table for table in self.tables if (table.link == "intra") == (link == "intra")]
        known = [table for table in known if crossings(table.link, table.k) > 0]

        def distance(table: LinkTable) -> tuple[bool, int, float, int]:
            unlike = abs(_pattern(table.link, table.k) - _pattern(link, k))
            return table.link != link or unlike > 0, unlike, abs(math.log(table.k / max(k, 1))), table.k

        return min(known, key=distance, default=None)


def _pattern(link: str, k: int) -> int:
    """Return the place of an exchange in the order send_recv, all-reduce, gather, intra: neighbours are most alike."""
    if link == "edges" or (link == "group" and k == 2):
        return 0
    return {"gather": 2, "intra": 3}.get(link, 1)


# Cluster and workload


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes, whose ranks share the node's network card and its work."""

    nodes: int
    links: Links
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        check_range(1, nodes=self.nodes, ranks_per_node=self.ranks_per_node)

    def intra_legs_s(self, workload: Workload, nbytes: float) -> float:
        """Return the seconds of an exchange's legs inside a node; FSDP's own count as compute time."""
        if workload.sharded or self.ranks_per_node == 1:
            return 0.0
        return self.links.tau("intra", self.ranks_per_node, nbytes)


@dataclass(frozen=True)
class Straggler:
    """In every iteration each node, with ``probability``, takes ``1 + slowdown`` times as long to compute."""

    probability: float = 0.0
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        check_range(0.0, 1.0, probability=self.probability)
        check_range(0.0, slowdown=self.slowdown)


@dataclass(frozen=True)
class Workload:
    """One training iteration of a node, bucket by bucket, in the order in which the backward pass completes them.

    ``plan_workload`` makes one of equal buckets; ``optimizer_s`` includes mixing. Three things apply to the forward and
    the backward pass: ``sigma``, the standard deviation of a node's time from iteration to iteration, relative to its
    mean; ``slowness``, each node's factor, empty if all are equally fast; and the ``straggler``. A model is ``sharded``
    if FSDP reduces inside a node, which is part of ``backward_s``; else every exchange has intra-node legs.
    """

    bucket_nbytes: tuple[int, ...]
    forward_s: float
    backward_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    sigma: float = 0.0
    slowness: tuple[float, ...] = ()
    straggler: Straggler = Straggler()
    sharded: bool = True

    def __post_init__(self) -> None:
        buckets, backwards, steps = len(self.bucket_nbytes), len(self.backward_s), len(self.optimizer_s)
        if not 0 < buckets == backwards == steps:
            got = f"{buckets} buckets, {backwards} backward times and {steps} optimizer times"
            raise InvalidArgumentError(f"got {got}, needed as many of each, at least one.")
        check_range(0.0, forward_s=self.forward_s, sigma=self.sigma, bucket_nbytes=self.bucket_nbytes)
        check_range(0.0, backward_s=self.backward_s, optimizer_s=self.optimizer_s, slowness=self.slowness)

    @property
    def nbytes(self) -> int:
        """The bytes of the model, S."""
        return sum(self.bucket_nbytes)

    @property
    def compute_s(self) -> float:
        """The seconds of an iteration without communication, C = F + B + o, of a node of slowness 1."""
        return self.forward_s + sum(self.backward_s) + sum(self.optimizer_s)

    def steady(self) -> Workload:
        """Return the same workload without variation: every node takes the mean time in every iteration."""
        mean = fmean(self.slowness or (1.0,)) * (1 + self.straggler.probability * self.straggler.slowdown)
        backward_s = tuple(mean * one for one in self.backward_s)
        steady = replace(self, forward_s=self.forward_s * mean, backward_s=backward_s)
        return replace(steady, sigma=0.0, slowness=(), straggler=Straggler())

    def draw(self, nodes: int, iteration: int, seed: int) -> NDArray[np.float64]:
        """Return each node's factor on its compute time in an iteration, a function of the arguments alone.

        All methods get the same factors, so their ratio does not depend on chance.
        """
        slowness = self.slowness or (1.0,) * nodes
        if len(slowness) != nodes:
            raise InvalidArgumentError(f"got {len(slowness)} factors of slowness for {nodes} nodes, needed {nodes}.")
        generator = np.random.default_rng((seed, iteration))
        # A normal draw of many sigma could be negative; time cannot.
        factors = np.maximum(1 + self.sigma * generator.standard_normal(nodes), 0.0) * slowness
        return factors * (1 + self.straggler.slowdown * (generator.random(nodes) < self.straggler.probability))


def plan_workload(
    nbytes: int,
    *,
    bucket_nbytes: int,
    forward_s: float,
    backward_s: float,
    optimizer_s: float = 0.0,
    sigma: float = 0.0,
    slowness: tuple[float, ...] = (),
    straggler: Straggler = Straggler(),  # noqa: B008  (frozen)
    sharded: bool = True,
) -> Workload:
    """Return the workload of a model in equal buckets, with the compute times spread evenly over them.

    ``nbytes`` are those that the ranks of a node exchange together, such as 4 per fp32 parameter, in buckets of at most
    ``bucket_nbytes``: 25 MiB in DDP, ``flexcomm.BUCKET_BYTES`` in flexdemo. For the others see :class:`Workload`.
    """
    check_range(1, nbytes=nbytes, bucket_nbytes=bucket_nbytes)
    count = math.ceil(nbytes / bucket_nbytes)
    ends = [nbytes * number // count for number in range(count + 1)]
    sizes = tuple(end - begin for begin, end in pairwise(ends))
    each_s = (backward_s / count,) * count, (optimizer_s / count,) * count
    return Workload(sizes, forward_s, *each_s, sigma, slowness, straggler, sharded)


@dataclass(frozen=True)
class Compression:
    """Sizes and costs of ``flexcomm.demo(k, chunk)``. Every node sends ``k`` of each ``chunk * chunk`` coefficients.

    ``bits_per_coefficient`` includes the index and a share of the headers; averaged coefficients are those of the
    second phase of ``two_phase``. Costs are per element of a rank's shard, and per coefficient received from any node.
    """

    k: int = 32
    chunk: int = 64
    bits_per_coefficient: float = 25.0
    encode_s_per_element: float = 0.0
    decode_s_per_element: float = 0.0
    decode_s_per_coefficient: float = 0.0
    averaged_bits_per_coefficient: float = 41.0
    element_nbytes: int = 4

    def __post_init__(self) -> None:
        check_range(1, self.chunk * self.chunk, k=self.k)
        check_range(0.0, **{name: cost for name, cost in vars(self).items() if "_s_per_" in name})
        bits = self.bits_per_coefficient, self.averaged_bits_per_coefficient
        check_range(1, bits_per_coefficient=bits, element_nbytes=self.element_nbytes)

    def coefficients(self, nbytes: float) -> float:
        """Return the number of coefficients that a node sends of a bucket of ``nbytes``."""
        return nbytes / self.element_nbytes * self.k / self.chunk**2

    def payload_nbytes(self, nbytes: float) -> float:
        """Return the bytes of a node's payload for a bucket of ``nbytes``."""
        return self.coefficients(nbytes) * self.bits_per_coefficient / 8

    def averages_nbytes(self, nbytes: float, nodes: int) -> float:
        """Return the bytes of all averaged coefficients; nodes rarely select the same ones."""
        return min(nodes * self.coefficients(nbytes) * self.averaged_bits_per_coefficient / 8, nbytes)
