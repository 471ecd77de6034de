"""A bridge, one cable per node, and a rate limit at both ends of each cable."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cluster.netns import Node, Space, unavailable
from bench.cluster.rates import burst_nbytes
from bench.errors import ClusterUnavailableError

CABLE = "cable0"
SWITCH_ADDRESS = "10.77.255.254"

# A queue that never drops: lost packets would be sent again, and the counters would show bytes nobody asked for.
_QUEUE_NBYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Traffic:
    """Bytes that crossed one node's cable, headers included, by the switch's interface counters."""

    node: str
    sent_nbytes: int
    received_nbytes: int

    def since(self, earlier: "Traffic") -> "Traffic":
        """Return what was added after ``earlier``."""
        sent_nbytes = self.sent_nbytes - earlier.sent_nbytes
        return Traffic(self.node, sent_nbytes, self.received_nbytes - earlier.received_nbytes)


def connect(space: Space, rate_bits_per_s: int) -> None:
    """Join every node to the switch by a cable that carries ``rate_bits_per_s`` each way."""
    _connect_switch(space, rate_bits_per_s)
    for node in space.nodes:
        _connect_node(space, node, rate_bits_per_s)


def traffic(space: Space) -> list[Traffic]:
    """Return each node's bytes since the cluster was made, from one reading of the switch's counters."""
    counters = _interface_counters(Path(f"/proc/{space.keeper_pid}/net/dev").read_text())
    ports = [counters[_port(i)] for i in range(len(space.nodes))]
    # What the switch received on a port is what the node sent.
    return [Traffic(node.name, *counts) for node, counts in zip(space.nodes, ports, strict=True)]


def _port(index: int) -> str:
    return f"port{index}"


def _connect_switch(space: Space, rate_bits_per_s: int) -> None:
    # addrgenmode none: IPv6 would announce itself on every cable, and the counters would show it.
    links = [
        "link add bridge0 type bridge mcast_snooping 0",
        "link set bridge0 addrgenmode none up",
        f"address add {SWITCH_ADDRESS}/16 dev bridge0",
    ]
    for i, node in enumerate(space.nodes):
        links.append(f"link add {_port(i)} type veth peer name {CABLE} netns {node.pid}")
        links.append(f"link set {_port(i)} addrgenmode none master bridge0 up")
    _configure(space.on_switch(["ip", "-batch", "-"]), links)
    limits = [_limit(_port(i), rate_bits_per_s) for i in range(len(space.nodes))]
    _configure(space.on_switch(["tc", "-batch", "-"]), limits)


def _connect_node(space: Space, node: Node, rate_bits_per_s: int) -> None:
    address = f"address add {node.address}/16 dev {CABLE}"
    links = ["link set lo up", address, f"link set {CABLE} addrgenmode none up"]
    _configure(space.on_node(node, ["ip", "-batch", "-"]), links)
    _configure(space.on_node(node, ["tc", "-batch", "-"]), [_limit(CABLE, rate_bits_per_s)])


def _limit(interface: str, rate_bits_per_s: int) -> str:
    burst = burst_nbytes(rate_bits_per_s)
    return f"qdisc add dev {interface} root tbf rate {rate_bits_per_s}bit burst {burst} limit {_QUEUE_NBYTES}"


def _configure(command: Sequence[str], lines: Sequence[str]) -> None:
    text = "\n".join(lines) + "\n"
    # Its own session, so that Ctrl-C reaches us alone and is not mistaken for a refusal.
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != 0:
        raise ClusterUnavailableError(unavailable(f"the kernel refused a cable: {done.stderr.strip()}"))


def _interface_counters(proc_net_dev: str) -> dict[str, tuple[int, int]]:
    """Return received and sent bytes by interface."""
    rows = (line.partition(":") for line in proc_net_dev.splitlines() if ":" in line)
    fields = {name.strip(): values.split() for name, _, values in rows}
    return {name: (int(values[0]), int(values[8])) for name, values in fields.items()}
