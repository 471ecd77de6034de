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


def _exchange(plan: TensorPlan, kernels: Kernels) -> None:
    """Send ones from one sender to itself."""
    bucket = BufferPlan.of((TensorSpec("x", (plan.rows, plan.cols), torch.float32),), (plan,), 0)
    words, x = torch.empty(bucket.nwords, dtype=torch.int32), torch.ones(plan.rows, plan.cols)
    encoder, states = kernels.encoder(bucket, words), [torch.zeros(plan.state_shape)]
    encoder.encode_([x], None, None, StateUpdate(), step=0, sequence=0)
    encoder.encode_([x], states, states, StateUpdate(), step=0, sequence=0)
    encoder.rollback_([x], states, StateUpdate(), step=0)
    decoder = kernels.decoder(bucket, words, [Region("self", 0, bucket.nwords)])
    decoder.verify(step=0, sequence=0)
    for kind in get_args(EpilogueKind):
        decoder.decode_([x], step=0, average="nodes", epilogue=Epilogue(kind))


def _exchange_by_all_codes(kernels: Kernels) -> None:
    for code in ValueCode:
        _exchange(TensorPlan(1, 8, 1, 8, False, Selection.STRIDING, 2, code), kernels)


def _mix(kernels: Kernels) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(4, dtype=dtype)
        for others in (1, 2):
            kernels.mix_(x, 0.5, [x] * others, [0.25] * others, torch.empty_like(x))


_PLANS = {
    "squares": TensorPlan(64, 64, 64, 64, True, Selection.TOP_K, 4, ValueCode.BF16),
    "rows": TensorPlan(1, 64, 1, 64, True, Selection.TOP_K, 4, ValueCode.SIGN),
    "any chunks": TensorPlan(1, 8, 1, 8, True, Selection.STRIDING, 2, ValueCode.BF16),
    "threshold": TensorPlan(1, 8, 1, 8, False, Selection.THRESHOLD, 4, ValueCode.BF16),
    "random": TensorPlan(1, 8, 1, 8, False, Selection.RANDOM_K, 2, ValueCode.BF16),
}
# Most that differs between plans is data to the loops. So few calls compile everything, and a test holds them against
# the laws that every kernel set goes through. Those that take longest come first.
CALLS: dict[str, Callable[[Kernels], None]] = {name: partial(_exchange, plan) for name, plan in _PLANS.items()}
CALLS["value codes"] = _exchange_by_all_codes
CALLS["mix"] = _mix


def compile_ahead(name: str) -> None:
    """Compile what one of the calls needs, unless it is in the cache."""
    from flexcomm.kernels.cpu import CpuKernels  # needs numba, whose absence main() reports

    CALLS[name](CpuKernels(threads=1))


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


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _fail(reason: str) -> int:
    sys.stderr.write(f"error: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
