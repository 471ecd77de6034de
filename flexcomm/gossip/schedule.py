"""Schedules: the phase of every step, checked before anything is sent, and how well the phases average."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from reprlib import repr as few
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.phase import ROUNDING, Edge, Group, Matrix, Phase, as_count, as_int

MOST_NODES = 4096
"""Above this many nodes the matrix of a schedule takes too much memory and time."""
_SUM_TOLERANCE = 1e-6
"""The largest deviation of a column's sum from 1: matrices may come in float32."""


class ScheduleLike(Protocol):
    """What mixing needs of a schedule: a value, equal on all ranks, with a phase for every step."""

    @property
    def nodes(self) -> int: ...
    @property
    def is_doubly_stochastic(self) -> bool: ...
    @property
    def is_fixed(self) -> bool: ...
    @property
    def digest(self) -> str: ...
    def phase(self, step: int) -> Phase: ...


@dataclass(frozen=True)
class ScheduleReport:
    """The properties of a schedule; ``period`` is None if phases do not repeat.

    ``contraction`` and ``exact`` are of ``measured_phases`` phases, and None if there are too many nodes to compute it.
    """

    name: str
    nodes: int
    period: int | None
    most_peers: int
    contraction: float | None
    exact: bool | None
    measured_phases: int

    @classmethod
    def of(cls, one: Schedule | RandomSchedule, measured_phases: int) -> ScheduleReport:
        contraction, exact = (one.contraction, one.is_exact) if one.nodes <= MOST_NODES else (None, None)
        return cls(one.name, one.nodes, one.period, one.most_peers, contraction, exact, measured_phases)

    def __str__(self) -> str:
        if self.contraction is None:
            return f"{_summary(self)}, too many nodes to compute the contraction"
        averaging = "averages exactly" if self.exact else f"contraction {self.contraction:.6g}"
        return f"{_summary(self)}, {averaging} in {_count(self.measured_phases, 'phase')}"


def _summary(one: Schedule | ScheduleReport) -> str:
    phases = "random phases" if one.period is None else _count(one.period, "phase")
    return f"{one.name}: {_count(one.nodes, 'node')}, {phases}, at most {_count(one.most_peers, 'peer')} at a time"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


@dataclass(frozen=True, repr=False)
class Schedule:
    """The phases of one period; step ``s`` uses phase ``s`` modulo the period.

    Every phase preserves the mean over nodes (it is column stochastic), and repeated periods converge to it: the graph
    of all phases is strongly connected, and every node keeps a part of its own value.

    Args:
        name: shown in reports and errors.
        nodes: the number of nodes, numbered from 0.
        phases: at least one; ``Phase()`` is a step in which no node mixes.

    Example:
        >>> from flexcomm.gossip import Group, Phase, Schedule
        >>> Schedule("pair", 2, (Phase((Group((0, 1)),)),)).is_exact
        True

    """

    name: str
    nodes: int
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", as_count("nodes", self.nodes, self.name))
        object.__setattr__(self, "phases", tuple(self.phases))
        if not self.phases:
            raise InvalidArgumentError(f"{self.name} has no phases, but needs at least one, such as Phase().")
        for number, phase in enumerate(self.phases):
            if phase.highest >= self.nodes:
                raise InvalidArgumentError(
                    f"phase {number} of {self.name} has a node {phase.highest}, but its {self.nodes} nodes are 0 to "
                    f"{self.nodes - 1}: correct the phase, or the number of nodes."
                )
        _check_strongly_connected(self.name, self.nodes, self.phases)

    @property
    def period(self) -> int:
        """The number of steps after which phases repeat."""
        return len(self.phases)

    def phase(self, step: int) -> Phase:
        """Return the phase of a step; any integer is a step."""
        return self.phases[step % len(self.phases)]

    @property
    def is_fixed(self) -> bool:
        """Whether all steps have the same phase, which compressed mixing needs."""
        return self.period == 1

    @cached_property
    def is_doubly_stochastic(self) -> bool:
        """Whether rows sum to 1, too, in every phase; otherwise mixing needs push-sum to converge to the mean."""
        # In groups they always do.
        phases = [phase for phase in self.phases if phase.edges]
        return all(np.abs(phase.apply(np.ones(self.nodes)) - 1.0).max() <= ROUNDING for phase in phases)

    @cached_property
    def is_exact(self) -> bool:
        """Whether every node holds the mean after one period, to rounding (de-biased, if push-sum is needed)."""
        product = product_of(self.phases, self.nodes)
        return bool(np.abs(product / product.sum(axis=1, keepdims=True) - 1.0 / self.nodes).max() <= ROUNDING)

    @cached_property
    def contraction(self) -> float:
        """The factor by which one period shrinks the distance from the mean, at least; 0 if it is exact."""
        return 0.0 if self.is_exact else contraction_of(self.phases, self.nodes)

    @cached_property
    def most_peers(self) -> int:
        """The largest number of nodes that one node sends to, or receives from, in one phase."""
        return max(phase.most_peers for phase in self.phases)

    def report(self) -> ScheduleReport:
        """Return the properties of this schedule; they print as one line."""
        return ScheduleReport.of(self, self.period)

    @cached_property
    def digest(self) -> str:
        """A short text, equal for equal schedules only; the same in every process."""
        # Tuples print faster than dataclasses do.
        groups = [[(group.members, group.self_weight) for group in phase.groups] for phase in self.phases]
        edges = [[(edge.source, edge.target, edge.weight) for edge in phase.edges] for phase in self.phases]
        return hashlib.blake2b(repr((self.name, self.nodes, groups, edges)).encode(), digest_size=16).hexdigest()

    def __str__(self) -> str:
        return _summary(self)

    def __repr__(self) -> str:
        return f"Schedule({self.name!r}, nodes={self.nodes}, period={self.period}, digest={self.digest})"


@dataclass(frozen=True)
class RandomSchedule:
    """Random pairs at every step, a function of the seed and the step alone.

    It has no period. ``contraction`` is that of the first ``measured_phases`` phases: a sample, not a bound.
    """

    nodes: int
    seed: int = 0
    period: ClassVar[None] = None
    is_doubly_stochastic: ClassVar[bool] = True
    is_fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", as_count("nodes", self.nodes, "random_matching"))
        object.__setattr__(self, "seed", as_int(self.seed, "the seed of random_matching"))

    @property
    def name(self) -> str:
        return f"random_matching({self.nodes}, seed={self.seed})"

    def phase(self, step: int) -> Phase:
        return _draw_matching(self.nodes, self.seed, int(step))

    @property
    def is_exact(self) -> bool:
        """Whether a phase averages all nodes."""
        return self.nodes <= 2

    @property
    def measured_phases(self) -> int:
        return 1 if self.is_exact else 4 * (self.nodes - 1).bit_length()

    @cached_property
    def contraction(self) -> float:
        phases = [self.phase(step) for step in range(self.measured_phases)]
        return 0.0 if self.is_exact else contraction_of(phases, self.nodes)

    @property
    def most_peers(self) -> int:
        return min(1, self.nodes - 1)

    def report(self) -> ScheduleReport:
        return ScheduleReport.of(self, self.measured_phases)

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.name.encode(), digest_size=16).hexdigest()


# Every bucket of a step asks for the same phase.
@lru_cache(maxsize=16)
def _draw_matching(nodes: int, seed: int, step: int) -> Phase:
    key = hashlib.blake2b(f"matching {seed} {step}".encode(), digest_size=16).digest()
    # Sorting raw draws, not Generator.permutation: numpy promises the former's bits in all its versions.
    draws = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(nodes)
    order = np.argsort(draws, kind="stable").tolist()
    return Phase(tuple(Group((one, other)) for one, other in zip(order[::2], order[1::2], strict=False)))


def _check_strongly_connected(name: str, nodes: int, phases: Sequence[Phase]) -> None:
    """Raise unless repeating the phases brings the value of every node to every other node."""
    targets, sources = defaultdict(set), defaultdict(set)
    for source, target in chain.from_iterable(phase.links() for phase in phases):
        targets[source].add(target)
        sources[target].add(source)
    problems = {"the value of node 0 never reaches": targets, "node 0 never receives the values of": sources}
    for problem, links in problems.items():
        missing = sorted(set(range(nodes)) - reachable(0, links))
        if missing:
            raise InvalidArgumentError(
                f"in {name} {problem} {few(missing)}, however many periods pass, so the {nodes} nodes never converge "
                f"to a common mean: add a phase, a group or edges that connect them."
            )


def reachable(start: int, links: Mapping[int, set[int]]) -> set[int]:
    """Return the nodes that links lead to from ``start``, which is one of them."""
    reached, waiting = {start}, [start]
    while waiting:
        fresh = links.get(waiting.pop(), set()) - reached
        reached |= fresh
        waiting.extend(fresh)
    return reached


def product_of(phases: Sequence[Phase], nodes: int) -> Matrix:
    """Return the product of the phases' matrices, ``[nodes, nodes]``."""
    if nodes > MOST_NODES:
        raise InvalidArgumentError(
            f"the contraction of {nodes} nodes needs a matrix of {nodes} by {nodes}, which is built for {MOST_NODES} "
            f"nodes at most: ask the same recipe for fewer nodes."
        )
    product = np.eye(nodes)
    for phase in phases:
        product = phase.apply(product)
    return product


def contraction_of(phases: Sequence[Phase], nodes: int) -> float:
    """Return an upper bound of the distance of all nodes from their mean after the phases, as a share of that before.

    With B the product of the phases and J = 11'/n, it is the largest singular value of B - J. If B is column stochastic
    only, the weights of push-sum converge to n*p, where B p = p. From then on, de-biased values are mixed by D^-1 B D,
    D = diag(n*p), and the factor of the distance weighted by p is that of D^-1/2 (B - p 1') D^1/2.
    """
    product, stationary = product_of(phases, nodes), np.full(nodes, 1.0 / nodes)
    if np.abs(product.sum(axis=1) - 1.0).max() > ROUNDING:
        stationary = np.linalg.solve(product - np.eye(nodes) + 1.0 / nodes, stationary)
    scale = np.sqrt(nodes * stationary)
    distance = (product - stationary[:, None]) * (scale / scale[:, None])
    return float(np.sqrt(max(np.linalg.eigvalsh(distance.T @ distance)[-1], 0.0)))


def from_edges(nodes: int, pairs: Iterable[tuple[int, int]], *, name: str = "from_edges") -> Schedule:
    """Return the fixed schedule in which the two nodes of every pair mix at every step, both ways.

    Weights are Metropolis-Hastings, ``1 / (1 + the larger number of neighbours)`` (Xiao and Boyd, 2004). A pair may be
    given twice, and in any order; ``name`` is shown in reports and errors.
    """
    links = {(min(one, other), max(one, other)) for one, other in pairs}
    neighbours = Counter(chain.from_iterable(links))
    edges = []
    for one, other in links:
        weight = 1.0 / (1 + max(neighbours[one], neighbours[other]))
        edges += [Edge(one, other, weight), Edge(other, one, weight)]
    return Schedule(name, nodes, (Phase(edges=tuple(edges)),))


def from_matrix(*matrices: ArrayLike, name: str = "from_matrix") -> Schedule:
    """Return the schedule whose phases are these matrices, in this order.

    ``matrix[i][j]`` is the weight of node j's value in node i's sum. Columns sum to 1, the diagonal is positive; the
    schedule is doubly stochastic if rows sum to 1, too, within 1e-12: build matrices in float64. ``name`` is shown in
    reports and errors.
    """
    arrays = [np.asarray(matrix, dtype=np.float64) for matrix in matrices]
    shapes = [array.shape for array in arrays]
    if len(set(shapes)) != 1 or len(shapes[0]) != 2 or shapes[0][0] != shapes[0][1]:
        raise InvalidArgumentError(
            f"{name} was given matrices of shapes {shapes}, but needs at least one, all [nodes, nodes] for the same "
            f"number of nodes."
        )
    phases = []
    for number, array in enumerate(arrays):
        sums = array.sum(axis=0)
        worst = int(np.abs(sums - 1.0).argmax())
        # Written so that NaN is refused, too.
        if not abs(sums[worst] - 1.0) <= _SUM_TOLERANCE:
            raise InvalidArgumentError(
                f"column {worst} of matrix {number} of {name} sums to {sums[worst]:.6g}, but must sum to 1, or the "
                f"mean over nodes would change. Row i holds what node i adds up; if yours is what it sends, transpose."
            )
        targets, sources = np.nonzero(array - np.diag(np.diag(array)))
        edges = map(Edge, sources.tolist(), targets.tolist(), array[targets, sources].tolist())
        phases.append(Phase(edges=tuple(edges)))
    return Schedule(name, len(arrays[0]), tuple(phases))
