"""``python -m bench first-use``: how long the first synchronisation of a process takes, with and without a cache.

The ranks run :func:`synchronise` of this file under ``torchrun``; each writes the time of its first call to a file.
"""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import typer

from bench.cluster.launchers import run_on_loopback
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.errors import BenchError
from bench.tables import print_table
from flexcomm import Compressor

_REPEATS = 5
_QUICK_REPEATS = 1
_COMPILATIONS = 3
_RANKS_PER_NODE = 2
_SIDE = 512
_CACHE = "FLEXCOMM_CACHE_DIR"
_FIGURES = frozenset({"one_rank_s", "four_over_one_s", "later_s", "later_over_dense_s"})


class RanksFailedError(BenchError):
    """The ranks ended without a result; their own output says why."""

    exit_code = 1


def first_use(json_file: JsonOption = None, quick: QuickOption = False, check: CheckOption = False) -> None:
    """Time the first hierarchical_sync of new processes: with an empty cache of kernels, and with a full one.

    --quick leaves the empty cache out, and compiles into your own.
    """
    rows: list[dict[str, object]] = []
    unmeasured = {}
    if quick:
        reason = "--quick: compiling with an empty cache takes a minute or two"
        unmeasured = dict.fromkeys(("one_rank_s", "four_over_one_s"), reason)
        rows += _measure_later(_QUICK_REPEATS)
    else:
        rows += _measure_compiling(_COMPILATIONS)
        with _empty_cache():
            rows += _measure_later(_REPEATS)
    columns = ("first call", "seconds", "processor seconds")
    table = [(str(row["start"]), f"{row['seconds']:.2f}", f"{row['processor_s']:.2f}") for row in rows]
    print_table("the first hierarchical_sync of a process: slowest rank, and all ranks", columns, table, sys.stdout)
    figures = _figures({str(row["start"]): float(str(row["seconds"])) for row in rows})
    print(", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    report = Report("first-use", _FIGURES, figures, rows, unmeasured=unmeasured)
    raise typer.Exit(conclude(report, json_file=json_file, check=check))


def _figures(seconds: Mapping[str, float]) -> dict[str, float]:
    later = seconds["later, demo(k=32)"]
    figures = {"later_s": later, "later_over_dense_s": later - seconds["later, dense()"]}
    if "empty cache, 1 rank" in seconds:
        one, four = seconds["empty cache, 1 rank"], seconds["empty cache, 4 ranks"]
        figures |= {"one_rank_s": one, "four_over_one_s": four - one}
    return figures


def _measure_compiling(repeats: int) -> list[dict[str, object]]:
    """Return the fastest of each, interleaved: a minute of compiling varies by more than ranks may add to it."""
    names = {1: "empty cache, 1 rank", 4: "empty cache, 4 ranks"}
    found: dict[int, list[dict[str, object]]] = {ranks: [] for ranks in names}
    for _ in range(repeats):
        for ranks, start in names.items():
            with _empty_cache():
                found[ranks].append(_time_ranks(start, "demo", ranks))
    return [min(times, key=lambda row: float(str(row["seconds"]))) for times in found.values()]


def _measure_later(repeats: int) -> list[dict[str, object]]:
    """Interleave the compressors, so that other load on the machine affects both; the first round compiles."""
    names = {"demo": "later, demo(k=32)", "dense": "later, dense()"}
    rounds = [[_time_ranks(start, name, 1) for name, start in names.items()] for _ in range(repeats + 1)]
    return [
        {
            "start": start,
            **{key: median(float(str(one[i][key])) for one in rounds[1:]) for key in ("seconds", "processor_s")},
        }
        for i, start in enumerate(names.values())
    ]


def _time_ranks(start: str, compressor: str, ranks: int) -> dict[str, object]:
    nodes = max(1, ranks // _RANKS_PER_NODE)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.first_use", compressor, folder]
        code = run_on_loopback(command, nodes=nodes, ranks_per_node=ranks // nodes, launcher="torchrun")
        times = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
        if code or len(times) != ranks:
            raise RanksFailedError(f"{ranks} ranks ended with exit code {code} and left {len(times)} results.")
    seconds, processor = zip(*times, strict=True)
    return {"start": start, "seconds": max(seconds), "processor_s": sum(processor)}


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get(_CACHE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_CACHE] = folder
        try:
            yield
        finally:
            os.environ.pop(_CACHE)
            if before is not None:
                os.environ[_CACHE] = before


def synchronise(compressor: str, folder: Path) -> None:
    """Time the first call of this rank, and write its seconds and processor seconds to ``folder``."""
    import torch

    import flexcomm

    chosen: dict[str, Callable[[], Compressor]] = {"demo": lambda: flexcomm.demo(k=32), "dense": flexcomm.dense}
    with flexcomm.connect(timeout_s=600) as world:
        x = torch.arange(float(_SIDE * _SIDE)).view(_SIDE, _SIDE)
        start_s, start_processor_s = time.perf_counter(), _processor_s()
        flexcomm.hierarchical_sync(x, chosen[compressor](), world=world)
        took = time.perf_counter() - start_s, _processor_s() - start_processor_s
        (folder / f"{world.topology.rank}.json").write_text(json.dumps(took))


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    synchronise(sys.argv[1], Path(sys.argv[2]))
