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
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from importlib.util import find_spec
from typing import get_args

import torch

from flexcomm.kernels.base import Epilogue, EpilogueKind, Kernels, StateUpdate
from flexcomm.kernels.layout import BufferPlan, Region
from flexcomm.kernels.plan import Selection, TensorPlan, TensorSpec, ValueCode


def _exchange(plans: tuple[TensorPlan, ...], kernels: Kernels) -> None:
    """Send ones from one sender to itself."""
    specs = tuple(TensorSpec(str(plan), (plan.rows, plan.cols), torch.float32) for plan in plans)
    bucket, xs = BufferPlan.of(specs, plans, 0), [torch.ones(spec.shape) for spec in specs]
    words, states = torch.empty(bucket.nwords, dtype=torch.int32), [torch.zeros(plan.state_shape) for plan in plans]
    encoder = kernels.encoder(bucket, words)
    encoder.encode_(xs, None, None, StateUpdate(), step=0, sequence=0)
    encoder.encode_(xs, states, states, StateUpdate(), step=0, sequence=0)
    encoder.rollback_(xs, states, StateUpdate(), step=0)
    decoder = kernels.decoder(bucket, words, [Region("self", 0, bucket.nwords)])
    decoder.verify(step=0, sequence=0)
    for kind in get_args(EpilogueKind):
        decoder.decode_(xs, step=0, average="nodes", epilogue=Epilogue(kind))


def _mix(kernels: Kernels) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(4, dtype=dtype)
        for others in (1, 2):
            kernels.mix_(x, 0.5, [x] * others, [0.25] * others, torch.empty_like(x))


_PLANS = {
    "squares": (TensorPlan(64, 64, 64, 64, True, Selection.TOP_K, 4, ValueCode.BF16),),
    "rows": (TensorPlan(1, 64, 1, 64, True, Selection.TOP_K, 4, ValueCode.SIGN),),
    "any chunks": (TensorPlan(1, 8, 1, 8, True, Selection.STRIDING, 2, ValueCode.BF16),),
    "threshold": (TensorPlan(1, 8, 1, 8, False, Selection.THRESHOLD, 4, ValueCode.BF16),),
    "random": (TensorPlan(1, 8, 1, 8, False, Selection.RANDOM_K, 2, ValueCode.BF16),),
    "value codes": tuple(TensorPlan(1, 8, 1, 8, False, Selection.STRIDING, 2, code) for code in ValueCode),
}
# Most that differs between plans is data to the loops. So few calls compile everything, and a test holds them against
# the laws that every kernel set goes through. Those that take longest come first.
CALLS: dict[str, Callable[[Kernels], None]] = {name: partial(_exchange, plans) for name, plans in _PLANS.items()}
CALLS["mix"] = _mix


def compile_ahead(name: str) -> None:
    """Compile what one of the calls needs, unless it is in the cache."""
    from flexcomm.kernels.cpu import CpuKernels  # needs numba, whose absence main() reports

    CALLS[name](CpuKernels(threads=1))


def main(arguments: Sequence[str]) -> None:
    """Do what the command line asks for; exit with an error where that cannot be."""
    parser = argparse.ArgumentParser("python -m flexcomm.kernels", description="Compile all CPU kernels ahead.")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile")
    parser.add_argument("--clear", action="store_true", help="remove everything that was compiled, for all versions")
    options = parser.parse_args(arguments)
    if find_spec("numba") is None:
        sys.exit("error: the CPU kernels need numba, which is not installed: `pip install flexcomm`.")
    if options.clear:
        _clear()
    else:
        _compile_all(max(1, options.jobs))


def _compile_all(jobs: int) -> None:
    # By a name that started processes can import: none of them imports a package's __main__ as such.
    from flexcomm.kernels.__main__ import compile_ahead
    from flexcomm.kernels.cpu.compiler import kernel_folders

    start_s = time.monotonic()
    _say(f"compiling the CPU kernels: {', '.join(CALLS)}")
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(compile_ahead, name): name for name in CALLS}
        for count, done in enumerate(as_completed(under_way), 1):
            done.result()
            _say(f"{count} of {len(CALLS)}: {under_way[done]}")
    for folder in kernel_folders():
        if found := [path for path in folder.glob("*") if not path.suffix]:
            nbytes = sum(file.stat().st_size for file in found)
            _say(f"{len(found)} kernels, {nbytes / 1e6:.1f} MB, in {time.monotonic() - start_s:.1f} s: {folder}")
            return
    sys.exit("error: nothing could be kept: set FLEXCOMM_CACHE_DIR to a folder that can be written.")


def _clear() -> None:
    from flexcomm.kernels.cpu.compiler import kernel_folders

    for folder in kernel_folders():
        # Next to this version's folder are those of others, of other processors and of other settings.
        if folder.parent.exists():
            shutil.rmtree(folder.parent)
            _say(f"removed {folder.parent}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
