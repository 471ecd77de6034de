"""The link between nodes as a rank sees it: what it carries, and the bytes that crossed it.

On a node of ``python -m bench cluster`` the cable itself says both. Elsewhere the user says the first, and nobody the
second: the interfaces of a real host carry other people's bytes too.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.cluster.links import CABLE
from bench.cluster.rates import format_rate, parse_rate


@dataclass(frozen=True)
class Link:
    """What a node's link carries each way; ``source`` says how we know."""

    rate_bits_per_s: float
    source: str

    def __str__(self) -> str:
        return f"{format_rate(self.rate_bits_per_s)} ({self.source})"


def find_link(told: str | None) -> Link | None:
    """Return the link of this rank's node, as told or as its emulated cable says; None if nobody knows."""
    if told is not None:
        return Link(parse_rate(told), "--link-rate")
    if read_sent_nbytes() is None:
        return None
    done = subprocess.run(["tc", "-j", "qdisc", "show", "dev", CABLE], capture_output=True, text=True, check=False)
    rate_bits_per_s = shaper_rate(done.stdout) if done.returncode == 0 else None
    return None if rate_bits_per_s is None else Link(rate_bits_per_s, "emulated cable")


def shaper_rate(tc_json: str) -> float | None:
    """Return the bits per second of the token bucket that tc lists, if it lists one."""
    shapers = [one for one in json.loads(tc_json or "[]") if one.get("kind") == "tbf"]
    # tc counts bytes.
    return 8.0 * float(shapers[0]["options"]["rate"]) if shapers else None


def read_sent_nbytes(proc_net_dev: Path = Path("/proc/self/net/dev")) -> int | None:
    """Return what this emulated node sent over its cable so far, headers included; None on any other host."""
    for line in proc_net_dev.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == CABLE:
            return int(counters.split()[8])
    return None
