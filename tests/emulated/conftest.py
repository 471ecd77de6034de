"""Fixtures for tests on emulated clusters.

``cluster`` is a running one of 2 nodes x 2 ranks at 50 mbit, shared by all tests:

    def test_something(cluster: Cluster) -> None:
        finished = cluster.run([sys.executable, "-c", PROGRAM], launcher="openmpi", timeout_s=60)
        assert finished.exit_code == 0, finished.stderr
        finished.stdout, finished.traffic[0].sent_nbytes        # what ranks printed; what crossed node 0's link

Ranks keep the test's environment and working folder, so ``import flexcomm`` works in them. ``finished.traffic`` holds
the bytes of this command alone.
"""

import subprocess
from collections.abc import Iterator

import pytest

from bench.cluster import Cluster, ClusterSpec, open_cluster
from bench.cluster.netns import check_available
from bench.errors import ClusterUnavailableError


@pytest.fixture(scope="session")
def emulation() -> None:
    """Skip, with the reason, where this machine cannot emulate a cluster."""
    try:
        check_available()
    except ClusterUnavailableError as error:
        pytest.skip(str(error))
    if subprocess.run(["unshare", "--net", "--mount", "--pid", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this kernel or container refuses new namespaces, even to root")


@pytest.fixture(scope="session")
def cluster(emulation: None) -> Iterator[Cluster]:  # noqa: ARG001
    """A running cluster of 2 nodes x 2 ranks, at 50 mbit.

    All of a worker's tests depend on it, so it waits for as long as the other worker's test may keep both cores busy.
    """
    with open_cluster(ClusterSpec(nodes=2, ranks_per_node=2, rate="50mbit", patience_s=180.0)) as running:
        yield running
