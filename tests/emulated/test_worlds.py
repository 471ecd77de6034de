"""``flexcomm.connect()`` on nodes that are really apart finds them, and bytes cross the link only when they must."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from bench.cluster.cluster import launch_command
from bench.cluster.launchers import LAUNCHERS, Launcher, is_installed
from tests.slow import slow_but

if TYPE_CHECKING:
    from bench.cluster import Cluster, Finished

INTER_NBYTES = 2_000_000
INTRA_NBYTES = 8_000_000
# Starting the ranks talks too: MPI's wiring, torch's store, the agreement.
STARTUP_NBYTES = 500_000

PROGRAM = f"""
import os, socket, torch, flexcomm
torch.set_num_threads(1)
with flexcomm.connect(timeout_s=60) as world:
    rank = world.topology.rank
    inside = world.intra.all_gather(torch.full(({INTRA_NBYTES},), rank, dtype=torch.uint8)).wait()[:, -1].tolist()
    between = world.inter.all_gather(torch.full(({INTER_NBYTES},), rank, dtype=torch.uint8)).wait()[:, -1].tolist()
    line = f"{{world.topology}} on {{socket.gethostname()}}: inside {{inside}}, between {{between}}"
os.write(1, (line + chr(10)).encode())
"""


@pytest.fixture(params=slow_but(["openmpi"], LAUNCHERS))
def launcher(request: pytest.FixtureRequest) -> Launcher:
    name: Launcher = request.param
    if not is_installed(name):
        pytest.skip(f"{name} is not installed")
    return name


def places(finished: Finished) -> list[str]:
    assert finished.exit_code == 0, finished.stderr
    return sorted(re.findall(r"rank \d of 4: .*", finished.stdout))


def test_every_launcher_finds_the_nodes_by_itself_and_only_the_inter_link_is_used_between_them(
    cluster: Cluster, launcher: Launcher
) -> None:
    finished = cluster.run([sys.executable, "-c", PROGRAM], launcher=launcher, timeout_s=90)
    first, second = (node.name for node in cluster.nodes)
    assert places(finished) == [
        f"rank 0 of 4: node 0 of 2, local rank 0 of 2 ({launcher}) on {first}: inside [0, 1], between [0, 2]",
        f"rank 1 of 4: node 0 of 2, local rank 1 of 2 ({launcher}) on {first}: inside [0, 1], between [1, 3]",
        f"rank 2 of 4: node 1 of 2, local rank 0 of 2 ({launcher}) on {second}: inside [2, 3], between [0, 2]",
        f"rank 3 of 4: node 1 of 2, local rank 1 of 2 ({launcher}) on {second}: inside [2, 3], between [1, 3]",
    ]
    for traffic in finished.traffic:
        assert 2 * INTER_NBYTES <= traffic.sent_nbytes <= 2 * INTER_NBYTES * 1.15 + STARTUP_NBYTES


@pytest.mark.slow
def test_ranks_dealt_out_round_robin_are_found_on_their_nodes(cluster: Cluster) -> None:
    """Open MPI numbers no nodes; local ranks that do not count up in blocks make the library ask MPI."""
    if not is_installed("openmpi"):
        pytest.skip("openmpi is not installed")
    launch = launch_command(cluster.space, "openmpi", 2, [sys.executable, "-c", PROGRAM])
    argv = [word.replace("slot:OVERSUBSCRIBE", "node:OVERSUBSCRIBE") for word in launch.argv]
    assert argv != list(launch.argv)
    first, second = (node.name for node in cluster.nodes)
    assert places(cluster._run_captured(argv, launch.full_env(), 90)) == [
        f"rank 0 of 4: node 0 of 2, local rank 0 of 2 (openmpi) on {first}: inside [0, 2], between [0, 1]",
        f"rank 1 of 4: node 1 of 2, local rank 0 of 2 (openmpi) on {second}: inside [1, 3], between [0, 1]",
        f"rank 2 of 4: node 0 of 2, local rank 1 of 2 (openmpi) on {first}: inside [0, 2], between [2, 3]",
        f"rank 3 of 4: node 1 of 2, local rank 1 of 2 (openmpi) on {second}: inside [1, 3], between [2, 3]",
    ]


KILL_A_NODE = """
import os, signal, flexcomm, torch
world = flexcomm.connect(timeout_s=20)
world.control.barrier().wait()
if world.topology.node == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    world.inter.all_gather(torch.ones(10)).wait()
except flexcomm.PeerLostError as error:
    os.write(1, f"rank {world.topology.rank} lost a peer: {error}".encode() + bytes([10]))
    raise
"""


def test_a_survivor_of_a_lost_node_raises_by_name(cluster: Cluster) -> None:
    finished = cluster.run([sys.executable, "-c", KILL_A_NODE], launcher="torchrun", timeout_s=90)
    assert finished.exit_code != 0
    assert re.search(r"rank [01] lost a peer: gloo on rank 0 of 2: a peer is gone", finished.stdout), finished.stdout
