import sys

import pytest

from bench.cluster import Cluster, ClusterSpec, links, open_cluster
from bench.errors import RateNotKeptError

RECEIVER = """
import socket, sys, time
nbytes, messages = int(sys.argv[1]), int(sys.argv[2])
with socket.create_server(("", 4711)) as listener:
    connection, _ = listener.accept()
    for _ in range(messages):
        remaining = nbytes
        while remaining:
            remaining -= len(connection.recv(min(remaining, 65536)))
        print("arrived", time.monotonic(), flush=True)
        connection.sendall(b"+")
"""

SENDER = """
import socket, sys, time
nbytes, messages, idle_s, peer = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
while True:
    try:
        connection = socket.create_connection((peer, 4711))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
for _ in range(messages):
    time.sleep(idle_s)
    print("left", time.monotonic(), flush=True)
    connection.sendall(bytes(nbytes))
    connection.recv(1)
"""


def _send(cluster: Cluster, nbytes: int, messages: int, idle_s: float) -> tuple[list[float], int]:
    """Send messages from node 0 to node 1; return how long each took, and the bytes that left node 0."""
    peer = cluster.nodes[1].address
    sender = [sys.executable, "-c", SENDER, str(nbytes), str(messages), str(idle_s), peer]
    receiver = [sys.executable, "-c", RECEIVER, str(nbytes), str(messages)]
    finished = cluster.run_on_nodes({0: sender, 1: receiver}, timeout_s=30)
    assert finished.exit_code == 0, finished.stderr
    lines = [line.split() for line in finished.stdout.splitlines()]
    times = {word: sorted(float(t) for w, t in lines if w == word) for word in ("left", "arrived")}
    durations_s = [arrived - left for left, arrived in zip(times["left"], times["arrived"], strict=True)]
    return durations_s, finished.traffic[0].sent_nbytes


def test_every_link_carries_its_rate_both_ways(cluster: Cluster) -> None:
    promised = cluster.spec.rate_bits_per_s
    carried = [rate for link in cluster.rates for rate in (link.sent_bits_per_s, link.received_bits_per_s)]
    assert len(carried) == 4
    assert all(0.9 * promised <= rate <= 1.1 * promised for rate in carried)


def test_idle_time_buys_no_free_transfer(cluster: Cluster) -> None:
    # 40 kB at 50 mbit take 6.4 ms. No message may beat 80 % of that; how much slower a busy machine is says nothing.
    durations_s, _ = _send(cluster, nbytes=40_000, messages=10, idle_s=0.05)
    assert min(durations_s) >= 0.8 * 40_000 * 8 / 50e6


def test_counters_show_what_was_sent_and_little_more(cluster: Cluster) -> None:
    _, sent_nbytes = _send(cluster, nbytes=3_000_000, messages=1, idle_s=0.0)
    assert 3_000_000 <= sent_nbytes <= 1.10 * 3_000_000


def test_counters_of_a_silent_command_stay_near_zero(cluster: Cluster) -> None:
    finished = cluster.run_on_nodes({0: ["true"], 1: ["true"]}, timeout_s=20)
    assert all(t.sent_nbytes < 2_000 and t.received_nbytes < 2_000 for t in finished.traffic)


def test_a_link_that_breaks_its_promise_is_refused(cluster: Cluster) -> None:
    rates = links.measure_rates(cluster.space, cluster.spec.rate_bits_per_s, duration_s=0.05, patience_s=0)
    with pytest.raises(RateNotKeptError, match=r"promised 200mbit.*node0.*sends .*mbit and receives .*mbit"):
        links.check_rates(rates, 200_000_000)


@pytest.mark.usefixtures("emulation")
def test_a_cluster_whose_links_are_slower_than_promised_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = links.connect
    monkeypatch.setattr(links, "connect", lambda space, rate_bits_per_s: connect(space, rate_bits_per_s // 2))
    with (
        pytest.raises(RateNotKeptError),
        open_cluster(ClusterSpec(nodes=2, rate="100mbit", probe_s=0.05, patience_s=0)),
    ):
        raise AssertionError("a command could have run on it")
