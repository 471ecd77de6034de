"""The memory that encode and decode take beyond inputs, momentum, payloads and outputs.

Each is measured in a process of its own, because the kernel remembers only the highest peak of one: all inputs are
made and touched, the loops are compiled on a small tensor, and then the peak (``VmHWM``) after one call is
compared with the resident size (``VmRSS``) before it. glibc keeps freed memory and hands it out again, which would
hide a temporary; it is told to give back anything of 64 KiB and more at once. A copy of the input, made afterwards in
the same process, must be seen whole, or the method does not work here.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.codec.codecs import CHUNK, FlexcommCodec
from bench.errors import BenchError
from flexcomm import Compressor, demo, threshold

_CHECKOUT = Path(__file__).resolve().parents[2]
_STATUS = Path("/proc/self/status")
_ROWS, _COLS = 2048, 4096
_NODES = 8
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_CASES: dict[str, tuple[tuple[int, ...], Compressor]] = {
    "64 x 64, k = 32": ((_ROWS, _COLS), demo(32, CHUNK)),
    "flat 64, k = 8": ((_ROWS * _COLS,), demo(8, CHUNK)),
    "threshold, 1/16 sent": ((_ROWS * _COLS,), threshold(1.0)),
}
VERBS = ("encode", "decode")


@dataclass(frozen=True)
class ExtraMemory:
    """Peak memory of a verb beyond its inputs and outputs."""

    case: str
    verb: str
    extra_mb: float


class MemoryUnknownError(BenchError):
    """The peak memory of a process cannot be read on this machine."""


def measure_memory(cases: int) -> list[ExtraMemory]:
    """Return the extra memory of the first ``cases`` cases, for each verb."""
    if not _STATUS.exists():
        raise MemoryUnknownError(f"{_STATUS} is not here: only Linux tells the peak of a process.")
    return [ExtraMemory(case, verb, _measure_alone(case, verb)) for case in list(_CASES)[:cases] for verb in VERBS]


def _measure_alone(case: str, verb: str) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "bench.codec.memory", case, verb],
        cwd=_CHECKOUT,
        env={**os.environ, **_MALLOC},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    if found["copy_mb"] < 0.9 * found["dense_mb"]:
        raise MemoryUnknownError(
            f"a copy of {found['dense_mb']:.1f} MB raised the peak by {found['copy_mb']:.1f} MB only, so peaks cannot "
            f"be trusted here."
        )
    return found["extra_mb"]


def _main(case: str, verb: str) -> None:
    torch.set_num_threads(1)
    shape, compressor = _CASES[case]
    _prepare((CHUNK,) * len(shape), compressor, verb)()
    body = _prepare(shape, compressor, verb)
    given_mb = _status_mb("VmRSS")
    body()
    extra_mb = _status_mb("VmHWM") - given_mb
    # What the method must be able to see: a second dense tensor.
    copy = torch.empty(shape).fill_(1.0)
    copy_mb = _status_mb("VmHWM") - given_mb
    print(json.dumps({"extra_mb": extra_mb, "copy_mb": copy_mb, "dense_mb": copy.nbytes / 1e6}))


def _prepare(shape: tuple[int, ...], compressor: Compressor, verb: str) -> Callable[[], object]:
    """Return the call to be measured; its inputs are made, and touched."""
    ours, gradient = FlexcommCodec(shape, compressor), torch.empty(shape).normal_()
    if verb == "encode":
        return lambda: ours.encode_(gradient)
    gathered = ours.encode_(gradient).repeat(_NODES)
    # Into the gradient: a tensor freed here would leave a peak above what is resident, and be taken for an extra.
    return lambda: ours.decode_(gradient, gathered, _NODES)


def _status_mb(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    if found is None:
        raise MemoryUnknownError(f"{_STATUS} does not name {field}.")
    return int(found[1]) * 1024 / 1e6


if __name__ == "__main__":
    _main(*sys.argv[1:])
