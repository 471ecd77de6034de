"""Links of an emulated cluster: rate limits, byte counters, measured rates, and the link as a rank sees it.

Every node is joined to one bridge, the switch, by a link that has a rate limit at both ends. A cluster whose links do
not carry the rate they promise is refused.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from bench.cluster import netns
from bench.cluster.netns import Node, Space, unavailable
from bench.errors import ClusterUnavailableError, RateNotKeptError, UsageError

LINK_INTERFACE = "link0"
SWITCH_ADDRESS = "10.77.255.254"
TOLERANCE = 0.10

_BITS_PER_S = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}

LOWEST_RATE_BITS_PER_S = 100_000
HIGHEST_RATE_BITS_PER_S = 100_000_000_000

_FAST_BITS_PER_S = 500_000_000
_FRAME_NBYTES = 2000
_SEGMENTS_NBYTES = 68_000
# A queue that never drops: lost packets would be sent again, and the counters would show bytes nobody asked for.
_QUEUE_NBYTES = 16 * 1024 * 1024
_PROGRAMS = [sys.executable, "-I", "-S", str(Path(__file__).with_name("programs.py"))]
_FEWEST_ATTEMPTS = 4
# Two cores carried one 1 gbit link at full rate, not two at a time; slower links are measured together.
_TOGETHER_BITS_PER_S = 1_000_000_000


def parse_rate(text: str) -> int:
    """Return the bits per second that ``text`` names in tc's style: a number and ``kbit``, ``mbit`` or ``gbit``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)", text.strip().lower())
    if match is None:
        raise UsageError(
            f"got the rate {text!r}, needed a number with a unit, one of kbit, mbit, gbit (bits per second). "
            f"Write for example 100mbit or 2.5gbit."
        )
    rate_bits_per_s = round(float(match[1]) * _BITS_PER_S[match[2]])
    if not LOWEST_RATE_BITS_PER_S <= rate_bits_per_s <= HIGHEST_RATE_BITS_PER_S:
        raise UsageError(f"got the rate {text!r}, needed one between 100kbit and 100gbit.")
    return rate_bits_per_s


def format_rate(rate_bits_per_s: float) -> str:
    """Return the rate with the largest unit that leaves at least 1 before the point."""
    unit = next((u for u in ("gbit", "mbit") if rate_bits_per_s >= _BITS_PER_S[u]), "kbit")
    return f"{rate_bits_per_s / _BITS_PER_S[unit]:.4g}{unit}"


def burst_nbytes(rate_bits_per_s: int) -> int:
    """Return the token bucket's depth: the smallest that still carries 95 to 96 % payload.

    A deep bucket refills while ranks compute, and the next message is then free: with 256 kB of burst a
    40 kB message crosses "100 mbit" in 0.24 ms instead of 3.2 ms. The floor holds one Ethernet frame; the rest covers
    the 176 us by which the shaper's timer may be late (both found by trial between 10 mbit and 1 gbit).

    Fast links get a floor of one TCP segment batch, 64 KiB, which the shaper would otherwise cut into frames: without
    it, four nodes that send at once on two cores get 27 % of 1 gbit each, with it 90 % and more. The price is that
    0.7 ms worth of bytes is free after a pause.
    """
    floor_nbytes = _FRAME_NBYTES if rate_bits_per_s < _FAST_BITS_PER_S else _SEGMENTS_NBYTES
    return floor_nbytes + round(rate_bits_per_s / 8 * 176e-6)


def probe_nbytes(rate_bits_per_s: int, duration_s: float) -> int:
    """Return the bytes that measure a link for ``duration_s``, and never so few that one burst would dominate them."""
    return max(64 * 1024, round(rate_bits_per_s / 8 * duration_s))


@dataclass(frozen=True)
class Traffic:
    """Bytes that crossed one node's link, headers included, by the switch's interface counters."""

    node: str
    sent_nbytes: int
    received_nbytes: int

    def since(self, earlier: "Traffic") -> "Traffic":
        """Return the bytes added after ``earlier``."""
        sent_nbytes = self.sent_nbytes - earlier.sent_nbytes
        return Traffic(self.node, sent_nbytes, self.received_nbytes - earlier.received_nbytes)


def connect(space: Space, rate_bits_per_s: int) -> None:
    """Join every node to the switch by a link of ``rate_bits_per_s`` in each direction."""
    _connect_switch(space, rate_bits_per_s)
    for node in space.nodes:
        _connect_node(space, node, rate_bits_per_s)


def traffic(space: Space) -> list[Traffic]:
    """Return each node's bytes since the cluster was made, from one read of the switch's counters."""
    counters = _interface_counters(Path(f"/proc/{space.holder_pid}/net/dev").read_text())
    ports = [counters[_port(i)] for i in range(len(space.nodes))]
    # What the switch received on a port is what the node sent.
    return [Traffic(node.name, *counts) for node, counts in zip(space.nodes, ports, strict=True)]


def _port(index: int) -> str:
    return f"port{index}"


def _connect_switch(space: Space, rate_bits_per_s: int) -> None:
    # addrgenmode none: IPv6 would announce itself on every link, and the counters would show it.
    links = [
        "link add bridge0 type bridge mcast_snooping 0",
        "link set bridge0 addrgenmode none up",
        f"address add {SWITCH_ADDRESS}/16 dev bridge0",
    ]
    for i, node in enumerate(space.nodes):
        links.append(f"link add {_port(i)} type veth peer name {LINK_INTERFACE} netns {node.pid}")
        links.append(f"link set {_port(i)} addrgenmode none master bridge0 up")
    _configure(space.on_switch(["ip", "-batch", "-"]), links)
    limits = [_limit(_port(i), rate_bits_per_s) for i in range(len(space.nodes))]
    _configure(space.on_switch(["tc", "-batch", "-"]), limits)


def _connect_node(space: Space, node: Node, rate_bits_per_s: int) -> None:
    address = f"address add {node.address}/16 dev {LINK_INTERFACE}"
    links = ["link set lo up", address, f"link set {LINK_INTERFACE} addrgenmode none up"]
    _configure(space.on_node(node, ["ip", "-batch", "-"]), links)
    _configure(space.on_node(node, ["tc", "-batch", "-"]), [_limit(LINK_INTERFACE, rate_bits_per_s)])


def _limit(interface: str, rate_bits_per_s: int) -> str:
    burst = burst_nbytes(rate_bits_per_s)
    return f"qdisc add dev {interface} root tbf rate {rate_bits_per_s}bit burst {burst} limit {_QUEUE_NBYTES}"


def _configure(command: Sequence[str], lines: Sequence[str]) -> None:
    text = "\n".join(lines) + "\n"
    # Its own session, so that Ctrl-C reaches us alone and is not mistaken for a refusal.
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != 0:
        raise ClusterUnavailableError(unavailable(f"the kernel refused a link: {done.stderr.strip()}"))


def _interface_counters(proc_net_dev: str) -> dict[str, tuple[int, int]]:
    """Return received and sent bytes by interface."""
    rows = (line.partition(":") for line in proc_net_dev.splitlines() if ":" in line)
    fields = {name.strip(): values.split() for name, _, values in rows}
    return {name: (int(values[0]), int(values[8])) for name, values in fields.items()}


@dataclass(frozen=True)
class LinkRate:
    """Payload rates of one node's link in each direction, measured between the node and the switch."""

    node: str
    sent_bits_per_s: float
    received_bits_per_s: float

    def error(self, rate_bits_per_s: int) -> float:
        """Return the relative error of the direction that is further off the promised rate."""
        return max(abs(r / rate_bits_per_s - 1) for r in (self.sent_bits_per_s, self.received_bits_per_s))

    def better_of(self, other: "LinkRate", rate_bits_per_s: int) -> "LinkRate":
        """Return, for each direction, the result that is nearer to the promised rate."""
        sent = (self.sent_bits_per_s, other.sent_bits_per_s)
        received = (self.received_bits_per_s, other.received_bits_per_s)
        nearest = [min(pair, key=lambda rate: abs(rate - rate_bits_per_s)) for pair in (sent, received)]
        return LinkRate(self.node, *nearest)


def measure_rates(space: Space, rate_bits_per_s: int, duration_s: float, patience_s: float) -> list[LinkRate]:
    """Return the rates of each link, measured for about ``duration_s`` in each direction.

    A link that seems off is measured again and longer, until ``patience_s`` is over, and each direction's best result
    counts: a busy machine, or a busy host of a virtual one, can make a good link look bad for seconds, but a wrong
    limit is wrong every time.
    """
    best: dict[str, LinkRate] = {}
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


def check_rates(rates: Sequence[LinkRate], rate_bits_per_s: int) -> None:
    """Raise unless every link has its rate, within the tolerance, in both directions."""
    off = [rate for rate in rates if rate.error(rate_bits_per_s) > TOLERANCE]
    if off:
        found = "; ".join(
            f"{r.node} sends {format_rate(r.sent_bits_per_s)} and receives {format_rate(r.received_bits_per_s)}"
            for r in off
        )
        raise RateNotKeptError(
            f"links promised {format_rate(rate_bits_per_s)} but do not carry it within {TOLERANCE:.0%}: {found}. "
            f"The machine is too busy or too slow for this rate: end other work, or choose a lower --rate or fewer "
            f"--nodes."
        )


@contextmanager
def _server(space: Space) -> Iterator[None]:
    command = space.on_switch([*_PROGRAMS, "serve", SWITCH_ADDRESS])
    with netns.background(command) as process:
        try:
            netns.await_ready(process)
            yield
        finally:
            space.kill_commands()


def _measure_in_waves(space: Space, nodes: Sequence[Node], rate_bits_per_s: int, nbytes: int) -> Iterator[LinkRate]:
    width = max(1, _TOGETHER_BITS_PER_S // rate_bits_per_s)
    for start in range(0, len(nodes), width):
        yield from _measure_together(space, nodes[start : start + width], nbytes)


def _measure_together(space: Space, nodes: Sequence[Node], nbytes: int) -> list[LinkRate]:
    command = [*_PROGRAMS, "measure", SWITCH_ADDRESS, str(nbytes)]
    with ExitStack() as stack:
        running = [stack.enter_context(netns.background(space.on_node(node, command))) for node in nodes]
        return [_rate_of(node, process) for node, process in zip(nodes, running, strict=True)]


def _rate_of(node: Node, process: subprocess.Popen[str]) -> LinkRate:
    output, errors = process.communicate()
    if process.returncode != 0:
        last_line = errors.strip().splitlines()[-1:] or ["no message"]
        raise RateNotKeptError(f"the link of {node.name} could not be measured: {last_line[0]}")
    sent, received = json.loads(output)
    return LinkRate(node.name, sent, received)


@dataclass(frozen=True)
class Link:
    """The rate of a node's link in each direction, as a rank knows it; ``source`` says from where.

    On a node of ``python -m bench cluster`` the interface itself has the rate, and counts the bytes. Elsewhere the user
    gives the rate, and no bytes are counted: the interfaces of a real host carry other traffic, too.
    """

    rate_bits_per_s: float
    source: str

    def __str__(self) -> str:
        return f"{format_rate(self.rate_bits_per_s)} ({self.source})"


def find_link(told: str | None) -> Link | None:
    """Return the link of this rank's node, of the rate in ``told`` or of its emulated interface; None if unknown."""
    if told is not None:
        return Link(parse_rate(told), "--link-rate")
    if read_sent_nbytes() is None:
        return None
    done = subprocess.run(
        ["tc", "-j", "qdisc", "show", "dev", LINK_INTERFACE], capture_output=True, text=True, check=False
    )
    rate_bits_per_s = shaper_rate(done.stdout) if done.returncode == 0 else None
    return None if rate_bits_per_s is None else Link(rate_bits_per_s, "emulated link")


def shaper_rate(tc_json: str) -> float | None:
    """Return the bits per second of the token bucket that tc lists, if it lists one."""
    shapers = [one for one in json.loads(tc_json or "[]") if one.get("kind") == "tbf"]
    # tc counts bytes.
    return 8.0 * float(shapers[0]["options"]["rate"]) if shapers else None


def read_sent_nbytes(proc_net_dev: Path = Path("/proc/self/net/dev")) -> int | None:
    """Return the bytes this emulated node sent so far, headers included; None on any other host."""
    for line in proc_net_dev.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == LINK_INTERFACE:
            return int(counters.split()[8])
    return None


def describe_link(link: Link | None) -> str:
    """Return the rate of the link and its source, for people."""
    return "link unknown (--link-rate)" if link is None else f"link {link}"
