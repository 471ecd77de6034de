"""Where the ranks of a command that trains run: as nodes of this host, or on an emulated cluster of some rate."""

import os
import sys
from pathlib import Path

from bench.cluster import ClusterSpec, open_cluster
from bench.cluster.cluster import check_counts
from bench.cluster.launchers import find_launcher, parse_launcher
from bench.cluster.loopback import run_on_loopback
from bench.cluster.netns import check_available
from bench.errors import UsageError
from bench.train.plan import Settings
from flexcomm.topology import read_launcher


def check_start(settings: Settings) -> None:
    """Raise, before anything is written, unless ranks can be started as asked."""
    _check_not_a_rank()
    check_counts(settings.nodes, settings.ranks_per_node)
    find_launcher(parse_launcher(settings.launcher))
    if settings.rate is not None:
        ClusterSpec(settings.nodes, settings.ranks_per_node, settings.rate)
        if settings.links == "namespaces":
            check_available()


def _check_not_a_rank() -> None:
    launcher = read_launcher(os.environ).launcher
    if launcher != "none":
        raise UsageError(
            f"this process is a rank that {launcher} started, but this command starts ranks itself: run it without a "
            f"launcher, or, on real nodes, let the launcher run `python -m bench.train.rank DIR` with the plan.json of "
            f"another run in DIR."
        )


def start_ranks(settings: Settings, folder: Path) -> int:
    """Run the plan that lies in ``folder``, and return the exit code of its ranks."""
    command = [sys.executable, "-m", "bench.train.rank", str(folder.resolve())]
    launcher = parse_launcher(settings.launcher)
    nodes, ranks_per_node = settings.nodes, settings.ranks_per_node
    if settings.rate is None or settings.links == "paced":
        return run_on_loopback(command, nodes=nodes, ranks_per_node=ranks_per_node, launcher=launcher)
    with open_cluster(ClusterSpec(nodes, ranks_per_node, settings.rate)) as cluster:
        return cluster.run_attached(command, launcher=launcher)
