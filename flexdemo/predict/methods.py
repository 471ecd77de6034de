"""The methods that are compared. Each computes seconds per iteration from a cluster and a workload."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from flexcomm import InvalidArgumentError, gossip
from flexdemo.predict.calibration import compression_for_k
from flexdemo.predict.errors import PredictError
from flexdemo.runtime import (
    Updates,
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
    from flexdemo.predict.scenario import PredictOptions
    from flexdemo.runtime import Cluster, Compression, Horizon, Workload

__all__ = [
    "SCHEDULES",
    "AllReduceMethod",
    "DecentralizedMethod",
    "Family",
    "FlexDemoMethod",
    "Method",
    "make_schedule",
    "plan_methods",
]

Family = Literal["all-reduce", "decentralized", "flexdemo"]

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
"""Schedules that average exactly come first: of methods that take the same time, the first is recommended."""

_STEPS_WITHOUT_PERIOD = 4


class Method(Protocol):
    """A training method."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> Family: ...

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        """Return the seconds per iteration.

        Raises:
            InvalidArgumentError: the method does not exist for this number of nodes.

        """
        ...

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        """Return the bytes that a node sends to other nodes in an iteration, on average."""
        ...

    def describe_averaging(self, nodes: int) -> str:
        """Return how close a step brings the nodes to their mean."""
        ...


@dataclass(frozen=True)
class AllReduceMethod:
    """Data parallelism with All-Reduce, the baseline."""

    name: str = "all-reduce"
    family: Family = "all-reduce"

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        return simulate_all_reduce(cluster, workload, horizon).iteration_s

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        return crossings("all-reduce", cluster.nodes) * workload.nbytes

    def describe_averaging(self, nodes: int) -> str:  # noqa: ARG002  (the protocol's)
        return "exact, every step"


@dataclass(frozen=True)
class DecentralizedMethod:
    """Decentralized training with a schedule of ``flexcomm.gossip``."""

    name: str
    updates: Updates = "backward"
    family: Family = "decentralized"

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        schedule = make_schedule(self.name, cluster.nodes)
        return simulate_decentralized(cluster, workload, schedule, updates=self.updates, horizon=horizon).iteration_s

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        schedule = make_schedule(self.name, cluster.nodes)
        steps = schedule.period or _STEPS_WITHOUT_PERIOD
        models = 0.0
        for step in range(steps):
            phase = schedule.phase(step)
            models += sum(len(group.members) * crossings("group", len(group.members)) for group in phase.groups)
            models += len(phase.edges)
        return models / steps / cluster.nodes * workload.nbytes

    def describe_averaging(self, nodes: int) -> str:
        report = make_schedule(self.name, nodes).report()
        if report.contraction is None:
            return f"period {report.period or 'none'}"
        if report.exact:
            return f"exact in {report.measured_phases}"
        return f"to {report.contraction:.3g} in {report.measured_phases}"


@dataclass(frozen=True)
class FlexDemoMethod:
    """FlexDeMo with ``flexcomm.demo(k, chunk)``."""

    compression: Compression
    overlap: bool = True
    family: Family = "flexdemo"

    @property
    def name(self) -> str:
        return f"flexdemo k={self.compression.k}"

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        return simulate_flexdemo(cluster, workload, self.compression, overlap=self.overlap, horizon=horizon).iteration_s

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        algorithm = choose_algorithm(cluster.nodes, self.compression, workload.nbytes)
        return sent_nbytes(algorithm, cluster.nodes, self.compression, workload.nbytes)

    def describe_averaging(self, nodes: int) -> str:  # noqa: ARG002  (the protocol's)
        return f"1/{self.compression.chunk**2 / self.compression.k:.0f} of coefficients"


@lru_cache(maxsize=64)  # A schedule of thousands of nodes takes a second to build.
def make_schedule(name: str, nodes: int) -> ScheduleLike:
    """Return the schedule of that name in ``SCHEDULES`` for ``nodes``."""
    return SCHEDULES[name](nodes)


def plan_methods(
    options: PredictOptions, nodes: int, codec: Sequence[Compression]
) -> tuple[list[Method], dict[str, str]]:
    """Return the methods to compare with All-Reduce, those that average best first.

    Args:
        options: the schedules and values of k, from the command line.
        nodes: number of nodes.
        codec: measured costs of compression; if empty, costs are assumed.

    Returns:
        The methods, and the reason for each schedule that does not exist for so many nodes.

    Raises:
        PredictError: an option is invalid.

    """
    updates = next((one for one in get_args(Updates) if one == options.updates), None)
    if updates is None:
        raise PredictError(f"got --updates {options.updates!r}, needed one of {', '.join(get_args(Updates))}.")
    unknown = [name for name in options.schedules if name not in SCHEDULES]
    if unknown:
        raise PredictError(f"got --schedule {unknown[0]!r}, needed one of {', '.join(SCHEDULES)}.")
    methods: list[Method] = []
    skipped: dict[str, str] = {}
    for name in options.schedules:
        try:
            make_schedule(name, nodes)
        except InvalidArgumentError as error:
            skipped[name] = str(error)
        else:
            methods.append(DecentralizedMethod(name, updates))
    try:
        compressions = [compression_for_k(codec, k) for k in sorted(options.ks, reverse=True)]
    except InvalidArgumentError as error:
        raise PredictError(f"got --k {', '.join(map(str, options.ks))}: {error}") from error
    return [*methods, *(FlexDemoMethod(one, options.overlap) for one in compressions)], skipped
