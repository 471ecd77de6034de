"""``python -m flexcomm.kernels``: compile all CPU kernels ahead, for an image or from a login node.

Processes that use the same cache folder afterwards, on the same kind of processor, compile nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from flexcomm.kernels.ahead import CALLS, compile_ahead


def main(arguments: Sequence[str]) -> int:
    """Do what the command line asks for; return the code to exit with."""
    parser = argparse.ArgumentParser("python -m flexcomm.kernels", description="Compile all CPU kernels ahead.")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile")
    parser.add_argument("--clear", action="store_true", help="remove everything that was compiled, for all versions")
    options = parser.parse_args(arguments)
    if find_spec("numba") is None:
        return _fail("the CPU kernels need numba, which is not installed: `pip install flexcomm`.")
    return _clear() if options.clear else _compile_all(max(1, options.jobs))


def _compile_all(jobs: int) -> int:
    from flexcomm.kernels.cpu.compiler import kernel_folders

    start_s = time.monotonic()
    with _progress() as advance, ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(compile_ahead, name): name for name in CALLS}
        for done in as_completed(under_way):
            done.result()
            advance(under_way[done])
    for folder in kernel_folders():
        if found := _find_files(folder):
            nbytes = sum(file.stat().st_size for file in found)
            _say(f"{len(found)} kernels, {nbytes / 1e6:.1f} MB, in {time.monotonic() - start_s:.1f} s: {folder}")
            return 0
    return _fail("nothing could be kept: set FLEXCOMM_CACHE_DIR to a folder that can be written.")


def _clear() -> int:
    from flexcomm.kernels.cpu.compiler import kernel_folders

    for folder in kernel_folders():
        # Next to this version's folder are those of others, of other processors and of other settings.
        if folder.parent.exists():
            shutil.rmtree(folder.parent)
            _say(f"removed {folder.parent}")
    return 0


def _find_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if not path.suffix]


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Give a function that is told which call is compiled: it moves a bar, or writes lines where there is no rich."""
    if find_spec("rich") is None or not sys.stdout.isatty():
        count = iter(range(1, len(CALLS) + 1))
        _say(f"compiling the CPU kernels: {', '.join(CALLS)}")
        yield lambda name: _say(f"{next(count)} of {len(CALLS)}: {name}")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling the CPU kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(CALLS))
        yield lambda _name: progress.advance(task)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _fail(reason: str) -> int:
    sys.stderr.write(f"error: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
