"""Measure what every cable of an emulated cluster carries, and refuse the cluster if that is not what it promised."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from bench.cluster import netns
from bench.cluster.links import SWITCH_ADDRESS
from bench.cluster.netns import Node, Space
from bench.cluster.rates import format_rate, probe_nbytes
from bench.errors import RateNotKeptError

TOLERANCE = 0.10

_PROBE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("probe.py"))]
_FEWEST_ATTEMPTS = 4
# Two cores carried 1 gbit cables at full rate one at a time, not two; slower cables are measured together.
_TOGETHER_BITS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class CableRate:
    """Payload that one node's cable carries each way, measured between the node and the switch."""

    node: str
    sent_bits_per_s: float
    received_bits_per_s: float

    def error(self, rate_bits_per_s: int) -> float:
        """Return by which part of the promised rate the worse direction is off."""
        return max(abs(r / rate_bits_per_s - 1) for r in (self.sent_bits_per_s, self.received_bits_per_s))

    def better_of(self, other: "CableRate", rate_bits_per_s: int) -> "CableRate":
        """Return, for each direction, the one of two results that is nearer to the promised rate."""
        sent = (self.sent_bits_per_s, other.sent_bits_per_s)
        received = (self.received_bits_per_s, other.received_bits_per_s)
        nearest = [min(pair, key=lambda rate: abs(rate - rate_bits_per_s)) for pair in (sent, received)]
        return CableRate(self.node, *nearest)


def measure_rates(space: Space, rate_bits_per_s: int, duration_s: float, patience_s: float) -> list[CableRate]:
    """Return what each cable carries, measured for about ``duration_s`` each way.

    A cable that seems off is measured again and longer, until ``patience_s`` is over, and each direction's best result
    counts: a busy machine, or a busy host of a virtual one, can make a good cable look bad for seconds, but a wrong
    limit is wrong every time.
    """
    best: dict[str, CableRate] = {}
    off = list(space.nodes)
    attempts = count()
    deadline_s = time.monotonic() + patience_s
    with _server(space):
        while off and ((attempt := next(attempts)) < _FEWEST_ATTEMPTS or time.monotonic() < deadline_s):
            nbytes = probe_nbytes(rate_bits_per_s, duration_s * 2 ** min(attempt, _FEWEST_ATTEMPTS - 1))
            for rate in _measure_in_waves(space, off, rate_bits_per_s, nbytes):
                best[rate.node] = rate.better_of(best.get(rate.node, rate), rate_bits_per_s)
            off = [node for node in off if best[node.name].error(rate_bits_per_s) > TOLERANCE]
    return [best[node.name] for node in space.nodes]


def check_rates(rates: Sequence[CableRate], rate_bits_per_s: int) -> None:
    """Raise unless every cable carries what it promised, within the tolerance, both ways."""
    off = [rate for rate in rates if rate.error(rate_bits_per_s) > TOLERANCE]
    if off:
        found = "; ".join(
            f"{r.node} sends {format_rate(r.sent_bits_per_s)} and receives {format_rate(r.received_bits_per_s)}"
            for r in off
        )
        raise RateNotKeptError(
            f"cables promised {format_rate(rate_bits_per_s)} but do not carry it within {TOLERANCE:.0%}: {found}. "
            f"The machine is too busy or too slow for this rate: end other work, or choose a lower --rate or fewer "
            f"--nodes."
        )


@contextmanager
def _server(space: Space) -> Iterator[None]:
    command = space.on_switch([*_PROBE, "serve", SWITCH_ADDRESS])
    with netns.background(command) as process:
        try:
            netns.await_ready(process)
            yield
        finally:
            space.kill_commands()


def _measure_in_waves(space: Space, nodes: Sequence[Node], rate_bits_per_s: int, nbytes: int) -> Iterator[CableRate]:
    width = max(1, _TOGETHER_BITS_PER_S // rate_bits_per_s)
    for start in range(0, len(nodes), width):
        yield from _measure_together(space, nodes[start : start + width], nbytes)


def _measure_together(space: Space, nodes: Sequence[Node], nbytes: int) -> list[CableRate]:
    command = [*_PROBE, "measure", SWITCH_ADDRESS, str(nbytes)]
    with ExitStack() as stack:
        running = [stack.enter_context(netns.background(space.on_node(node, command))) for node in nodes]
        return [_rate_of(node, process) for node, process in zip(nodes, running, strict=True)]


def _rate_of(node: Node, process: subprocess.Popen[str]) -> CableRate:
    output, errors = process.communicate()
    if process.returncode != 0:
        last_line = errors.strip().splitlines()[-1:] or ["no message"]
        raise RateNotKeptError(f"the cable of {node.name} could not be measured: {last_line[0]}")
    sent, received = json.loads(output)
    return CableRate(node.name, sent, received)
