"""``python -m bench demo``: four ranks on two nodes of this host synchronise a tensor and show what each holds.

The ranks run :func:`synchronise` of this file under a real ``mpirun``; rank 0 writes down what all of them report.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bench.errors import BenchError
from bench.habits import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.loopback import run_on_loopback
from bench.tables import print_table

if TYPE_CHECKING:
    from flexcomm import Topology

_NODES = 2
_RANKS_PER_NODE = 2
_COLUMNS = ("rank", "node", "local rank", "before", "after", "wrong")


class DemoFailedError(BenchError):
    """The ranks ended without a result; what they printed says why."""

    exit_code = 1


def demo(json_file: JsonOption = None, quick: QuickOption = False, check: CheckOption = False) -> None:  # noqa: ARG001
    """Start four ranks as two nodes under mpirun, and check the tensor they synchronise."""
    rows = _run_ranks()
    print_table(
        f"{len(rows)} ranks on {_NODES} nodes: the mean of their tensors",
        _COLUMNS,
        [tuple(str(row[column]) for column in _COLUMNS) for row in rows],
        sys.stdout,
    )
    wrong = sum(int(str(row["wrong"])) for row in rows)
    print("every rank holds the exact mean" if wrong == 0 else f"{wrong} elements are wrong")
    report = Report("demo", frozenset({"wrong"}), {"wrong": float(wrong)}, rows)
    missed_code = conclude(report, json_file=json_file, check=check)
    raise typer.Exit(missed_code or int(wrong > 0))


def _run_ranks() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "bench.demo", str(result)]
        print(f"mpirun -n {_NODES * _RANKS_PER_NODE} python -m bench.demo {result}", flush=True)
        code = run_on_loopback(command, nodes=_NODES, ranks_per_node=_RANKS_PER_NODE, launcher="openmpi")
        if code or not result.exists():
            raise DemoFailedError(f"the ranks ended with exit code {code} and left no result; see above.")
        rows: list[dict[str, object]] = json.loads(result.read_text())
        return rows


def synchronise(result: Path) -> None:
    """What every rank does: sum inside the node, sum its share between nodes, and collect the shares again."""
    import torch

    import flexcomm

    torch.set_num_threads(1)
    with flexcomm.connect(ranks_per_node=_RANKS_PER_NODE, timeout_s=60) as world:
        place = world.topology
        before = torch.arange(4.0) + place.rank
        share = world.intra.reduce_scatter(before.view(place.local_size, -1)).wait()
        share = world.inter.all_reduce(share).wait() / place.size
        after = world.intra.all_gather(share).wait().view(-1)

        # Whole numbers, whose mean over four ranks is exact: rank r holds 0..3 shifted by r.
        expected = torch.arange(4.0) + (place.size - 1) / 2
        wrong = (after != expected).sum().view(1).float()
        held = world.control.all_gather(torch.cat([before, after, wrong])).wait().tolist()
        if place.rank == 0:
            rows = [_row(replace(place, rank=rank), numbers) for rank, numbers in enumerate(held)]
            result.write_text(json.dumps(rows))


def _row(place: "Topology", numbers: list[float]) -> dict[str, object]:
    shown = {"rank": place.rank, "node": place.node, "local rank": place.local_rank}
    return {**shown, "before": numbers[:4], "after": numbers[4:8], "wrong": int(numbers[8])}


if __name__ == "__main__":
    synchronise(Path(sys.argv[1]))
