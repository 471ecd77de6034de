"""Published milliseconds per iteration of three clusters, and the runtime model's prediction of them.

Figure 6 of arXiv 2410.11998: Transformer-base, 65 M parameters in fp32, 25,000 tokens in a global batch. Of every row
one figure is fitted to the All-Reduce bar, and the times of the decentralized methods are computed from it.
docs/runtime-model.md lists the inputs that are guessed and the bars that are not reproduced.

Workers here are GPUs, not nodes, as in the paper's schedules. AER pairs nodes (a, a XOR 2^r). A round has two phases:
in one of them a pair averages over the network, in the other inside its nodes. Even pairs begin inside, odd ones over
the network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from flexcomm import InvalidArgumentError
from flexcomm.gossip import Group, Phase
from flexdemo.runtime import (
    Cluster,
    Horizon,
    Workload,
    plan_workload,
    simulate_all_reduce,
    simulate_decentralized,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flexdemo.runtime import Schedule

MODEL_NBYTES = 260_000_000
_BUCKET_NBYTES = 26_000_000
_SHARES = (0.33, 0.62, 0.05)
"""Of the compute time: forward, backward, optimizer. Guessed, as is the variation on clusters where T is fitted."""
_SIGMA = 0.03
_HORIZON = Horizon(iterations=260, warmup=20)
_TIE = 0.01
"""Neither the published bars nor our inputs are known better than that."""

Method = Literal["all-reduce", "exponential", "alternating"]


@dataclass(frozen=True)
class PublishedRow:
    """One size of a cluster: published milliseconds, and the inputs that the model needs beside them.

    ``compute_ms`` is C. ``fast_ms``, the time to average the whole model inside a node, is a guess. Where
    ``line_rate_gb_per_s`` is given, the times of all exchanges follow from it, and sigma is fitted to the bar. Else T
    is fitted; with two nodes All-Reduce is the averaging of two nodes, so that row's T is AER's slow exchange.
    """

    cluster: str
    gpus: int
    gpus_per_node: int
    all_reduce_ms: float
    exponential_ms: float
    alternating_ms: float
    compute_ms: float
    fast_ms: float
    line_rate_gb_per_s: float | None = None

    @property
    def published_ms(self) -> dict[Method, float]:
        return {
            "all-reduce": self.all_reduce_ms,
            "exponential": self.exponential_ms,
            "alternating": self.alternating_ms,
        }


PUBLISHED = (
    PublishedRow("8xT4, 100 Gb/s InfiniBand", 16, 8, 372.5, 314.8, 312.3, 306.0, 30.0, 10.5),
    PublishedRow("8xT4, 100 Gb/s InfiniBand", 32, 8, 225.5, 178.8, 178.8, 172.0, 30.0, 10.5),
    PublishedRow("8xT4, 100 Gb/s InfiniBand", 64, 8, 167.3, 123.1, 122.2, 116.0, 30.0, 10.5),
    PublishedRow("4xA100, 100 Gb/s InfiniBand", 8, 4, 73.0, 63.4, 61.7, 60.0, 10.0),
    PublishedRow("4xA100, 100 Gb/s InfiniBand", 16, 4, 54.8, 46.8, 45.8, 44.5, 10.0),
    PublishedRow("4xA100, 100 Gb/s InfiniBand", 32, 4, 51.5, 44.7, 43.7, 42.5, 10.0),
    PublishedRow("4xA40, 25 Gb/s Ethernet", 8, 4, 166.1, 122.8, 122.0, 119.0, 30.0),
    PublishedRow("4xA40, 25 Gb/s Ethernet", 16, 4, 195.5, 97.4, 78.9, 66.0, 30.0),
    PublishedRow("4xA40, 25 Gb/s Ethernet", 32, 4, 188.5, 110.8, 67.9, 42.0, 30.0),
)


@dataclass(frozen=True)
class WorkerLinks:
    """Seconds for the whole model, of each class of exchange; a bucket takes its share."""

    all_s: float
    slow_s: float
    fast_s: float
    crossing_pairs_s: float

    def tau(self, link: str, k: int, nbytes: float) -> float:  # noqa: ARG002  (a class has one size only)
        seconds = {
            "all-reduce": self.all_s,
            "two nodes": self.slow_s,
            "one node": self.fast_s,
            "pairs that cross": self.crossing_pairs_s,
            "pairs inside": self.fast_s,
        }
        if link not in seconds:
            raise InvalidArgumentError(f"got the link {link!r}, needed one of {', '.join(seconds)}.")
        return seconds[link] * nbytes / MODEL_NBYTES


@dataclass(frozen=True)
class _Group(Group):
    link: str = "group"


@dataclass(frozen=True)
class Alternating:
    """AER on ``nodes`` workers of ``per_node`` each."""

    nodes: int
    per_node: int

    @property
    def period(self) -> int:
        return 2 * _log2(self.nodes // self.per_node)

    def phase(self, step: int) -> Phase:
        number, second = divmod(step % self.period, 2)
        hosts = self.nodes // self.per_node
        pairs = [(a, a ^ 1 << number) for a in range(hosts) if a < a ^ 1 << number]
        groups: list[_Group] = []
        for place, pair in enumerate(pairs):
            if place % 2 == second:
                groups += [_Group(self._workers(host), link="one node") for host in pair]
            else:
                groups.append(_Group(self._workers(pair[0]) + self._workers(pair[1]), link="two nodes"))
        return Phase(tuple(groups))

    def _workers(self, host: int) -> tuple[int, ...]:
        return tuple(range(host * self.per_node, (host + 1) * self.per_node))


@dataclass(frozen=True)
class Exponential:
    """One-peer exponential on ``nodes`` workers: j with j XOR 2^p. All pairs of a node that leave it share its card."""

    nodes: int
    per_node: int

    @property
    def period(self) -> int:
        return _log2(self.nodes)

    def phase(self, step: int) -> Phase:
        hop = 1 << step % self.period
        link = "pairs inside" if hop < self.per_node else "pairs that cross"
        return Phase(tuple(_Group((j, j ^ hop), link=link) for j in range(self.nodes) if j < j ^ hop))


def _log2(number: int) -> int:
    if number < 2 or number & (number - 1):
        raise InvalidArgumentError(
            f"got {number}, needed a power of two, 2 or more: the paper's schedules exist for no other."
        )
    return number.bit_length() - 1


def plan_published_workload(compute_ms: float, sigma: float) -> Workload:
    """Return the paper's model with that compute time, in ten buckets."""
    forward_s, backward_s, optimizer_s = (share * compute_ms / 1e3 for share in _SHARES)
    return plan_workload(
        MODEL_NBYTES,
        bucket_nbytes=_BUCKET_NBYTES,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        sigma=sigma,
    )


@dataclass(frozen=True)
class RowPrediction:
    """What the model says of a row. ``fitted`` names the figure that was fitted to the All-Reduce bar."""

    row: PublishedRow
    fitted: Literal["T", "sigma"]
    all_s: float
    slow_s: float
    sigma: float

    @cached_property
    def links(self) -> WorkerLinks:
        row = self.row
        volume = 2 * (row.gpus - 1) / row.gpus
        bytes_per_s = volume * MODEL_NBYTES / self.all_s
        return WorkerLinks(
            all_s=self.all_s,
            slow_s=self.slow_s,
            fast_s=row.fast_ms / 1e3,
            crossing_pairs_s=row.gpus_per_node * MODEL_NBYTES / bytes_per_s,
        )

    @cached_property
    def predicted_ms(self) -> dict[Method, float]:
        """Milliseconds per iteration; All-Reduce's is the fit."""
        row = self.row
        return {
            "all-reduce": _all_reduce_ms(row, self.links, self.sigma),
            "exponential": self._decentralized_ms(Exponential(row.gpus, row.gpus_per_node)),
            "alternating": self._decentralized_ms(Alternating(row.gpus, row.gpus_per_node)),
        }

    def _decentralized_ms(self, schedule: Schedule) -> float:
        load = plan_published_workload(self.row.compute_ms, self.sigma)
        cluster = Cluster(self.row.gpus, self.links)
        return 1e3 * simulate_decentralized(cluster, load, schedule, horizon=_HORIZON).iteration_s


def predict_row(row: PublishedRow, rows: tuple[PublishedRow, ...] = PUBLISHED) -> RowPrediction:
    """Return the model's figures for ``row``; the row of the same cluster with two nodes tells its slow exchange."""
    if row.line_rate_gb_per_s is not None:
        all_s, slow_s = (_ring_s(gpus, row.line_rate_gb_per_s) for gpus in (row.gpus, 2 * row.gpus_per_node))
        return RowPrediction(row, "sigma", all_s, slow_s, _fit_sigma(row, all_s))
    pair = next((one for one in rows if one.cluster == row.cluster and one.gpus == 2 * one.gpus_per_node), None)
    if pair is None:
        raise InvalidArgumentError(f"no row of {row.cluster} has two nodes, needed one: it tells what two nodes take.")
    return RowPrediction(row, "T", _fit_all_reduce_s(row), _fit_all_reduce_s(pair), _SIGMA)


def find_winners(milliseconds: Mapping[Method, float]) -> frozenset[Method]:
    """Return the fastest method, and those that take at most 1 % longer."""
    least = min(milliseconds.values())
    return frozenset(method for method, each in milliseconds.items() if each <= (1 + _TIE) * least)


def _ring_s(gpus: int, gb_per_s: float) -> float:
    return 2 * (gpus - 1) / gpus * MODEL_NBYTES / (gb_per_s * 1e9)


def _all_reduce_ms(row: PublishedRow, links: WorkerLinks, sigma: float) -> float:
    load = plan_published_workload(row.compute_ms, sigma)
    return 1e3 * simulate_all_reduce(Cluster(row.gpus, links), load, _HORIZON).iteration_s


def _fit_all_reduce_s(row: PublishedRow) -> float:
    """Return the T of the whole model at which the simulated All-Reduce takes as long as the published one."""
    base = WorkerLinks(0.0, 0.0, 0.0, 0.0)
    return _solve(lambda all_s: _all_reduce_ms(row, replace(base, all_s=all_s), _SIGMA), row.all_reduce_ms, 1.0)


def _fit_sigma(row: PublishedRow, all_s: float) -> float:
    links = WorkerLinks(all_s, 0.0, 0.0, 0.0)
    return _solve(lambda sigma: _all_reduce_ms(row, links, sigma), row.all_reduce_ms, 0.5)


def _solve(milliseconds: Callable[[float], float], wanted_ms: float, most: float) -> float:
    """Return where a growing function reaches ``wanted_ms``, between 0 and ``most``."""
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if milliseconds(middle) < wanted_ms else (low, middle)
    return (low + high) / 2
