"""The methods that are compared, each as a function from a cluster and a workload to seconds per iteration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

from flexcomm import InvalidArgumentError, gossip
from flexdemo.predict.errors import PredictError
from flexdemo.runtime import (
    choose_algorithm,
    sent_nbytes,
    simulate_all_reduce,
    simulate_decentralized,
    simulate_flexdemo,
)
from flexdemo.runtime.links import crossings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flexcomm.gossip import ScheduleLike
    from flexdemo.runtime import Cluster, Compression, Horizon, Updates, Workload

__all__ = [
    "SCHEDULES",
    "AllReduce",
    "Contestant",
    "DecentralizedMethod",
    "FlexDemo",
    "choose_schedules",
    "find_schedule",
]

Kind = Literal["all-reduce", "decentralized", "flexdemo"]

SCHEDULES: Mapping[str, Callable[[int], ScheduleLike]] = {
    "complete": gossip.complete,
    "one-peer-exp": gossip.one_peer_exponential,
    "base": gossip.base,
    "aer": gossip.alternating_exponential_ring,
    "directed-exp": gossip.directed_exponential,
    "static-exp": gossip.static_exponential,
    "ring": gossip.ring,
    "random-matching": gossip.random_matching,
}
"""Those that average exactly come first: among methods that take the same time the first is recommended."""

_STEPS_OF_ENDLESS = 4


class Contestant(Protocol):
    """A way to train."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        """Return the seconds per iteration. Raises ``InvalidArgumentError`` where so many nodes cannot do it."""
        ...

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        """Return the bytes that a node sends to others in an iteration, on average."""
        ...

    def describe_averaging(self, nodes: int) -> str:
        """Return how near nodes come to the mean."""
        ...


@dataclass(frozen=True)
class AllReduce:
    """What data-parallel training does today."""

    name: str = "all-reduce"
    kind: Kind = "all-reduce"

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        return simulate_all_reduce(cluster, workload, horizon).iteration_s

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        return crossings("all-reduce", cluster.nodes) * workload.nbytes

    def describe_averaging(self, nodes: int) -> str:  # noqa: ARG002  (the protocol's)
        return "exact, every step"


@dataclass(frozen=True)
class DecentralizedMethod:
    """Decentralized training by a schedule of flexcomm.gossip."""

    name: str
    updates: Updates = "backward"
    kind: Kind = "decentralized"

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        schedule = find_schedule(self.name, cluster.nodes)
        return simulate_decentralized(cluster, workload, schedule, updates=self.updates, horizon=horizon).iteration_s

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        schedule = find_schedule(self.name, cluster.nodes)
        steps = schedule.period or _STEPS_OF_ENDLESS
        crossed = 0.0
        for step in range(steps):
            phase = schedule.phase(step)
            crossed += sum(len(group.members) * crossings("group", len(group.members)) for group in phase.groups)
            crossed += len(phase.edges)
        return crossed / steps / cluster.nodes * workload.nbytes

    def describe_averaging(self, nodes: int) -> str:
        report = find_schedule(self.name, nodes).report()
        if report.contraction is None:
            return f"period {report.period or 'none'}"
        if report.exact:
            return f"exact in {report.measured_phases}"
        return f"to {report.contraction:.3g} in {report.measured_phases}"


@dataclass(frozen=True)
class FlexDemo:
    """FlexDeMo with ``demo(k, chunk)``."""

    compression: Compression
    overlap: bool = True
    kind: Kind = "flexdemo"

    @property
    def name(self) -> str:
        return f"flexdemo k={self.compression.k}"

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        return simulate_flexdemo(cluster, workload, self.compression, overlap=self.overlap, horizon=horizon).iteration_s

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        algorithm = choose_algorithm(cluster.nodes, self.compression, workload.nbytes)
        return sent_nbytes(algorithm, cluster.nodes, self.compression, workload.nbytes)

    def describe_averaging(self, nodes: int) -> str:  # noqa: ARG002  (the protocol's)
        return f"1/{self.compression.chunk**2 / self.compression.k:.0f} of it, every step"


@lru_cache(maxsize=64)
def find_schedule(name: str, nodes: int) -> ScheduleLike:
    """Return the schedule of that name; building one for thousands of nodes takes a second."""
    return SCHEDULES[name](nodes)


def choose_schedules(names: Sequence[str], nodes: int) -> tuple[list[str], dict[str, str]]:
    """Return those schedules that ``nodes`` can follow, and why the others cannot."""
    strange = [name for name in names if name not in SCHEDULES]
    if strange:
        raise PredictError(f"got the schedule {strange[0]!r}, needed one of {', '.join(SCHEDULES)}.")
    possible, skipped = [], {}
    for name in names:
        try:
            find_schedule(name, nodes)
        except InvalidArgumentError as error:
            skipped[name] = str(error)
        else:
            possible.append(name)
    return possible, skipped
