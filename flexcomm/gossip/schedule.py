"""Schedules: who mixes with whom at which step, checked before anything is sent."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.arguments import number_of
from flexcomm.gossip.averaging import MOST_NODES, averages_exactly, contraction_of
from flexcomm.gossip.phase import ROUNDING, Edge, Group, Phase
from flexcomm.gossip.reach import check_all_hear_of_all

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Edge", "Group", "Phase", "Schedule", "ScheduleLike", "ScheduleReport"]


class ScheduleLike(Protocol):
    """What mixing needs of a schedule: a value, equal on all ranks, with a phase for every step."""

    @property
    def name(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def period(self) -> int | None: ...
    @property
    def is_doubly_stochastic(self) -> bool: ...
    @property
    def is_symmetric(self) -> bool: ...
    @property
    def is_fixed(self) -> bool: ...
    @property
    def is_exact(self) -> bool: ...
    @property
    def contraction(self) -> float: ...
    @property
    def most_peers(self) -> int: ...
    @property
    def digest(self) -> str: ...
    def phase(self, step: int) -> Phase: ...
    def report(self) -> ScheduleReport: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class ScheduleReport:
    """What to expect of a schedule; ``contraction`` and ``exact`` are None where there are too many nodes to tell.

    ``period`` is None where phases do not repeat; ``contraction`` is that of ``measured_phases`` phases.
    """

    name: str
    nodes: int
    period: int | None
    most_peers: int
    contraction: float | None
    exact: bool | None
    measured_phases: int

    def __str__(self) -> str:
        return f"{_summary(self.name, self.nodes, self.period, self.most_peers)}, {self._averaging()}"

    def _averaging(self) -> str:
        phases = _count(self.measured_phases, "phase")
        if self.contraction is None:
            return "too many nodes to tell how well they average"
        return f"averages exactly in {phases}" if self.exact else f"contraction {self.contraction:.6g} in {phases}"


@dataclass(frozen=True, repr=False)
class Schedule:
    """The phases of one period; step ``s`` takes phase ``s`` modulo the period.

    Keeps the mean over nodes (every phase is column stochastic), and over periods brings every node to it: all nodes
    hear of each other, and every one keeps a part of its own. What cannot do so is refused at construction.
    A schedule is a value: it compares by its phases, and ``digest`` is the same in every process.
    """

    name: str
    nodes: int
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", number_of("nodes", self.nodes, self.name))
        object.__setattr__(self, "phases", tuple(self.phases))
        if not self.phases:
            raise InvalidArgumentError(
                f"{self.name} has no phases, but needs at least one: Phase() is one in which nobody mixes."
            )
        for number, phase in enumerate(self.phases):
            if phase.highest >= self.nodes:
                raise InvalidArgumentError(
                    f"phase {number} of {self.name} has a node {phase.highest}, but its {self.nodes} nodes are 0 to "
                    f"{self.nodes - 1}: correct the phase, or the number of nodes."
                )
        check_all_hear_of_all(self.name, self.nodes, self.phases)

    @property
    def period(self) -> int:
        """After how many steps the phases repeat."""
        return len(self.phases)

    def phase(self, step: int) -> Phase:
        """Return the phase of a step; any whole number is one."""
        return self.phases[step % len(self.phases)]

    @property
    def is_fixed(self) -> bool:
        """Whether every step mixes alike, which mixing with compressed state needs."""
        return self.period == 1

    @cached_property
    def is_doubly_stochastic(self) -> bool:
        """Whether equal nodes stay equal in every phase; where not, only push-sum averages."""
        return all(_rows_sum_to_one(phase) for phase in self.phases)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether in every phase any two nodes take of each other with the same weight."""
        return all(_takes_as_it_gives(phase) for phase in self.phases)

    @cached_property
    def is_exact(self) -> bool:
        """Whether every node holds the mean after one period, to rounding (de-biased, where only push-sum averages)."""
        return averages_exactly(self.phases, self.nodes)

    @cached_property
    def contraction(self) -> float:
        """By which factor one period at least shrinks the distance from the mean; 0 where it is exact."""
        return 0.0 if self.is_exact else contraction_of(self.phases, self.nodes)

    @cached_property
    def most_peers(self) -> int:
        """The most others to whom a node sends, or whom it hears, in one phase."""
        return max(phase.most_peers for phase in self.phases)

    def report(self) -> ScheduleReport:
        """Return what to expect of this schedule; it prints as one line."""
        told = self.nodes <= MOST_NODES
        return ScheduleReport(
            self.name,
            self.nodes,
            self.period,
            self.most_peers,
            self.contraction if told else None,
            self.is_exact if told else None,
            self.period,
        )

    @cached_property
    def digest(self) -> str:
        """A short text that two schedules share if, and only if, they are equal; the same in every process."""
        digest = hashlib.blake2b(f"{self.name!r} {self.nodes}\n".encode(), digest_size=16)
        for phase in self.phases:
            digest.update(";".join(_words(phase)).encode())
            digest.update(b"\n")
        return digest.hexdigest()

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __str__(self) -> str:
        return _summary(self.name, self.nodes, self.period, self.most_peers)

    # Ranks compare what is printed, and the phases of thousands of nodes are no reading.
    def __repr__(self) -> str:
        return f"Schedule({self.name!r}, nodes={self.nodes}, period={self.period}, digest={self.digest})"


def _rows_sum_to_one(phase: Phase) -> bool:
    """Whether every node takes as much as it gives; groups always do."""
    balance: dict[int, list[float]] = {}
    for edge in phase.edges:
        balance.setdefault(edge.source, []).append(-edge.weight)
        balance.setdefault(edge.target, []).append(edge.weight)
    return all(abs(math.fsum(weights)) <= ROUNDING for weights in balance.values())


def _takes_as_it_gives(phase: Phase) -> bool:
    weights = {(edge.source, edge.target): edge.weight for edge in phase.edges}
    return all(
        abs(weights.get((target, source), 0.0) - weight) <= ROUNDING for (source, target), weight in weights.items()
    )


def _words(phase: Phase) -> Iterator[str]:
    for group in phase.groups:
        weight = "-" if group.self_weight is None else group.self_weight.hex()
        yield f"group {','.join(map(str, group.members))} {weight}"
    for edge in phase.edges:
        yield f"edge {edge.source} {edge.target} {edge.weight.hex()}"


def _summary(name: str, nodes: int, period: int | None, most_peers: int) -> str:
    phases = "random phases" if period is None else _count(period, "phase")
    return f"{name}: {_count(nodes, 'node')}, {phases}, at most {_count(most_peers, 'peer')} at a time"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
