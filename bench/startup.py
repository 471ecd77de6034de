"""``python -m bench startup``: the time of ``import flexcomm`` beside that of ``import torch``."""

import subprocess
import sys
import time
from statistics import median

import typer

from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.tables import print_table

_REPEATS = 9
_QUICK_REPEATS = 1
_STATEMENTS = {"torch": "import torch, torch.distributed", "flexcomm": "import flexcomm"}


def startup(json_file: JsonOption = None, quick: QuickOption = False, check: CheckOption = False) -> None:
    """Time new processes that import torch, and torch with the library; the ratio of their medians counts."""
    seconds = _measure(_QUICK_REPEATS if quick else _REPEATS)
    ratio = seconds["flexcomm"] / seconds["torch"]
    rows = [{"import": name, "seconds": value} for name, value in seconds.items()]
    table = [(name, f"{value:.2f}") for name, value in seconds.items()]
    print_table("a new process, median", ("import", "seconds"), table, sys.stdout)
    print(f"ratio {ratio:.3f}")
    report = Report("startup", frozenset({"import_ratio"}), {"import_ratio": ratio}, rows)
    raise typer.Exit(conclude(report, json_file=json_file, check=check))


def _measure(repeats: int) -> dict[str, float]:
    """Interleave the imports, so that other load on the machine affects both; the first round only warms the disk."""
    rounds = [{name: _time(statement) for name, statement in _STATEMENTS.items()} for _ in range(repeats + 1)]
    return {name: median(one[name] for one in rounds[1:]) for name in _STATEMENTS}


def _time(statement: str) -> float:
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start_s
