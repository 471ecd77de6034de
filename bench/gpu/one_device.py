"""What one process does on one device: ``python -m bench.gpu.one_device kernels | few | speed | count``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial

from bench.gpu.results import Result, emit, try_law

_FEW = ("encode_fills", "verify_finds", "decode_gives", "mixing_gives", "rollback_restores")
"""Laws that run every kernel; a sanitizer makes everything many times slower."""


def check_kernels(names: tuple[str, ...] = ("",)) -> bool:
    """Check laws of kernels, each for itself, so that the report names those that are broken."""
    from flexcomm.kernels.gpu import GpuKernels
    from flexcomm.testing import KERNEL_LAWS

    kernels = GpuKernels()
    laws = [law for law in KERNEL_LAWS if law.__name__.startswith(names)]
    held = [try_law(law.__name__, partial(law, kernels, "cuda")) for law in laws]
    return all(held)


def show_speed() -> bool:
    """Measure encode, verify and decode beside a copy."""
    from bench.gpu.speed import DeviceClock, measure_speed
    from flexcomm.kernels.gpu import GpuKernels

    for result in measure_speed(GpuKernels(), "cuda", DeviceClock()):
        emit(result)
    return True


def show_count() -> bool:
    """Count the first case for this device, or the closest one that there is an estimate for."""
    import torch

    from bench.gpu.cases import CASES
    from bench.gpu.count_table import CAPABILITIES, count_cases

    found = "".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else CAPABILITIES[0]
    rows, _ = count_cases(CASES[:1], [found])
    for row in rows:
        share = "not estimated" if row.least_share is None else f"{row.least_share:.0%} to {row.most_share:.0%} of HBM"
        said = f"{row.verb} {row.instructions:,.0f} warp instructions and {row.barriers:.0f} barriers a chunk"
        emit(Result(f"{row.verb}_instructions", holds=None, said=said, value=row.instructions))
        emit(Result(f"{row.verb}_estimate", holds=None, said=f"{row.verb} {share}", value=row.least_share))
    return True


ACTIONS: Mapping[str, Callable[[], bool]] = {
    "kernels": check_kernels,
    "few": partial(check_kernels, _FEW),
    "speed": show_speed,
    "count": show_count,
}


if __name__ == "__main__":
    raise SystemExit(0 if ACTIONS[sys.argv[1]]() else 1)
