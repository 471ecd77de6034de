"""Fit of the model's figures to measurements on some emulated clusters, for predictions on others.

A collective takes ``stretch`` times as long as its bytes at the link's rate, and the time of the host's cores, which
all nodes share: a latency for each message that has to wait for another one, times the nodes per core, and some time
for each byte of all nodes together. The three figures are fitted for each collective; they are the
library's and the machine's, so they hold at other rates and among other numbers of nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from bench.runtime.plan import ELEMENT_NBYTES, HostCosts, Load
from flexdemo.runtime import AlphaBeta, Compression, LinkTable

_PAIR = 2
_CHUNK = 64
_BITS = 8


@dataclass(frozen=True)
class Calibration:
    """Measurements on one cluster."""

    nodes: int
    rate_bits_per_s: float
    tables: tuple[LinkTable, ...]
    costs: HostCosts


@dataclass(frozen=True)
class LinkFit:
    """The figures of one collective; a ``stretch`` of 1.05 means that 95 % of the link's rate is payload."""

    stretch: float
    latency_s: float
    host_s_per_byte: float


@dataclass(frozen=True)
class HostFit:
    """Seconds of a core, for all buckets of an iteration; times the nodes that need the core at once."""

    all_reduce_s: float
    decentralized_s: float
    encode_s: float
    decode_s: float
    flexdemo_s: float
    payload_nbytes: float


@dataclass(frozen=True)
class Fitted:
    """All figures that predictions are made from."""

    links: Mapping[str, LinkFit]
    host: HostFit
    cores: int

    def nodes_per_core(self, nodes: float) -> float:
        """Return how many nodes share a core if all of them need one."""
        return _nodes_per_core(nodes, self.cores)

    def queued_s(self, work_s: float, sleep_s: float, nodes: int) -> float:
        """Return the time of work that every node does after a sleep, not all of them at once, with queueing for cores.

        Mean value analysis of a closed queue (Reiser and Lavenberg 1980), whose cores serve as one that is as fast as
        all of them and a delay (Seidmann et al. 1987). Without sleep that is nearly the time of all
        nodes at once, with much sleep nearly the work alone.
        """
        served_s, waiting = work_s / self.cores, 0.0
        delay_s = taken_s = work_s - served_s
        for count in range(1, nodes + 1):
            taken_s = delay_s + served_s * (1 + waiting)
            waiting = count * (taken_s - delay_s) / (sleep_s + taken_s) if taken_s else 0.0
        return taken_s

    def links_at(self, rate_bits_per_s: float, busy_nodes: float) -> "FittedLinks":
        """Return links of that rate, on which ``busy_nodes`` nodes communicate at a time."""
        return FittedLinks(self, rate_bits_per_s, busy_nodes)

    def compression(self, load: Load, nodes: int) -> Compression:
        """Return FlexDeMo's payload size and its encoding and decoding times among ``nodes`` nodes."""
        elements = load.nbytes / ELEMENT_NBYTES
        kept = elements * load.k / _CHUNK**2
        return Compression(
            k=load.k,
            chunk=_CHUNK,
            bits_per_coefficient=_BITS * self.host.payload_nbytes * load.buckets / kept,
            encode_s_per_element=self.nodes_per_core(nodes) * self.host.encode_s / elements,
            decode_s_per_element=self.nodes_per_core(nodes) * self.host.decode_s / elements,
        )


@dataclass(frozen=True)
class FittedLinks:
    """The fitted figures at one rate, with the interface of the model's links."""

    fitted: Fitted
    rate_bits_per_s: float
    busy_nodes: float

    def tau(self, link: str, k: int, nbytes: float) -> float:
        """Return the seconds of one collective."""
        fits = self.fitted.links
        collective = collective_of(link, k)
        # Two nodes cannot show how a larger group behaves; an all-reduce is most like it.
        figures = fits[collective] if collective in fits else fits["all-reduce"]
        on_link_s, messages, nbytes_in_all = _columns(
            link, k, nbytes, self.rate_bits_per_s, self.busy_nodes, self.fitted.cores
        )
        return on_link_s * figures.stretch + messages * figures.latency_s + nbytes_in_all * figures.host_s_per_byte


def fit(calibrations: Sequence[Calibration], cores: int) -> Fitted:
    """Return the figures nearest to the calibrations, in relative terms; nothing else is used."""
    points: dict[str, list[tuple[list[float], float]]] = {}
    for one in calibrations:
        for table in one.tables:
            for nbytes, seconds in zip(table.nbytes, table.seconds, strict=True):
                row = _columns(table.link, table.k, nbytes, one.rate_bits_per_s, one.nodes, cores)
                points.setdefault(collective_of(table.link, table.k), []).append((row, seconds))
    return Fitted({name: _fit_link(seen) for name, seen in points.items()}, _fit_host(calibrations, cores), cores)


def collective_of(link: str, k: int) -> str:
    """Return the collective whose figures apply: ``swap`` of two nodes or along edges, ``split`` of a larger group."""
    if link == "edges" or (link == "group" and k == _PAIR):
        return "swap"
    return "split" if link == "group" else link


def _columns(link: str, k: int, nbytes: float, rate_bits_per_s: float, busy_nodes: float, cores: int) -> list[float]:
    """Return seconds on the link, messages in a row times nodes on a core, and bytes of all nodes together."""
    crossings = AlphaBeta(bytes_per_s=1.0).tau(link, k, 1.0)
    in_a_row = {"swap": 1, "split": 2, "gather": k - 1, "all-reduce": 2 * (k - 1)}[collective_of(link, k)]
    sent = crossings * nbytes
    return [_BITS * sent / rate_bits_per_s, in_a_row * _nodes_per_core(busy_nodes, cores), busy_nodes * sent]


def _nodes_per_core(nodes: float, cores: int) -> float:
    return max(1.0, nodes / cores)


def _fit_link(points: Sequence[tuple[list[float], float]]) -> LinkFit:
    """Return the figures; nothing crosses a link faster than its rate, so only the time beyond that is fitted."""
    seconds = [taken_s for _, taken_s in points]
    beyond_s = [taken_s - row[0] for row, taken_s in points]
    slower, latency_s, host_s_per_byte = fit_nonnegative([row for row, _ in points], beyond_s, seconds)
    return LinkFit(1 + slower, latency_s, host_s_per_byte)


def _fit_host(calibrations: Sequence[Calibration], cores: int) -> HostFit:
    shares = [_nodes_per_core(one.nodes, cores) for one in calibrations]

    def unit(name: str) -> float:
        seconds = [getattr(one.costs, name) for one in calibrations]
        return fit_nonnegative([[share] for share in shares], seconds, seconds)[0]

    return HostFit(
        all_reduce_s=unit("all_reduce_s"),
        decentralized_s=unit("decentralized_s") + unit("mix_s"),
        encode_s=unit("encode_s"),
        # Whole: adding up what few nodes kept is too little beside the transform to be told from noise.
        decode_s=unit("decode_s"),
        flexdemo_s=unit("flexdemo_s"),
        payload_nbytes=calibrations[0].costs.payload_nbytes,
    )


def fit_nonnegative(rows: Sequence[Sequence[float]], wanted: Sequence[float], scales: Sequence[float]) -> list[float]:
    """Return the figures, none below zero, whose products with ``rows`` are nearest to ``wanted``.

    Errors count in relation to ``scales``, squared. Of columns that the points cannot tell apart, the first gets all.
    """
    a = np.array(rows, dtype=np.float64) / np.array(scales)[:, None]
    b = np.array(wanted, dtype=np.float64) / np.array(scales)
    best, least = np.zeros(a.shape[1]), float(b @ b)
    for columns in _subsets(a.shape[1]):
        figures = np.zeros(a.shape[1])
        figures[columns] = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
        error = float(((a @ figures - b) ** 2).sum())
        if (figures >= 0).all() and error < least * (1 - 1e-6) - 1e-12:
            best, least = figures, error
    return [float(figure) for figure in best]


def _subsets(count: int) -> Iterator[list[int]]:
    """Yield all choices of columns, few before many."""
    for size in range(1, count + 1):
        yield from map(list, combinations(range(count), size))
