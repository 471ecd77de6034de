import socket
import sys
import tempfile
from pathlib import Path

from bench.cluster import Cluster


def _on_both(cluster: Cluster, program: str) -> list[str]:
    outputs = [cluster.run_on_nodes({i: [sys.executable, "-c", program]}, timeout_s=20) for i in (0, 1)]
    assert [output.exit_code for output in outputs] == [0, 0], outputs
    return [output.stdout.strip() for output in outputs]


def test_every_node_sees_its_own_host_name(cluster: Cluster) -> None:
    names = _on_both(cluster, "import socket; print(socket.gethostname())")
    assert names == [node.name for node in cluster.nodes]
    assert len({*names, socket.gethostname()}) == 3


def test_every_node_finds_every_node_by_name(cluster: Cluster) -> None:
    names = [node.name for node in cluster.nodes]
    found = _on_both(cluster, f"import socket; print(*map(socket.gethostbyname, {names}))")
    assert found == [" ".join(node.address for node in cluster.nodes)] * 2


def test_the_host_does_not_learn_the_names_of_nodes(cluster: Cluster) -> None:
    assert cluster.nodes[0].name not in Path("/etc/hosts").read_text()


def test_nodes_share_neither_network_nor_shared_memory(cluster: Cluster) -> None:
    program = "import os; print(*[os.readlink(f'/proc/self/ns/{n}') for n in ('net', 'ipc', 'uts')])"
    ours = " ".join(str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("net", "ipc", "uts"))
    first, second = (text.split() for text in _on_both(cluster, program))
    assert all(len(set(links)) == 3 for links in zip(ours.split(), first, second, strict=True))


def test_a_file_in_shared_memory_stays_on_its_node(cluster: Cluster) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as ours:
        names = {"mine", Path(ours.name).name}
        program = f"import os; print({names} & set(os.listdir('/dev/shm'))); open('/dev/shm/mine', 'w').close()"
        assert _on_both(cluster, program) == ["set()", "set()"]
    assert not Path("/dev/shm/mine").exists()  # noqa: S108


def test_commands_start_in_the_callers_folder(cluster: Cluster) -> None:
    assert _on_both(cluster, "import os; print(os.getcwd())") == [str(Path.cwd())] * 2


def test_a_node_reaches_nothing_beyond_its_link(cluster: Cluster) -> None:
    interfaces = _on_both(cluster, "import socket; print(sorted(name for _, name in socket.if_nameindex()))")
    assert interfaces == ["['link0', 'lo']"] * 2


def test_what_a_command_leaves_running_ends_with_it(cluster: Cluster) -> None:
    stray = "import subprocess, sys; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    cluster.run_on_nodes({0: [sys.executable, "-c", stray]}, timeout_s=20)
    names = "[Path(p, 'comm').read_text().strip() for p in Path('/proc').glob('[0-9]*')]"
    programs = _on_both(cluster, f"from pathlib import Path; print({names}.count('sleep'))")
    assert programs == [str(len(cluster.nodes))] * 2  # the sleeps that keep the nodes
