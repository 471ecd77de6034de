"""A short run on the cluster itself, whose figures go into a file."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

import flexcomm
from flexdemo.predict.calibration import Calibration, write_calibration
from flexdemo.predict.measure_codec import measure_codec
from flexdemo.predict.measure_compute import DEFAULT_NAME, SmallTransformer, load_workload, measure_compute
from flexdemo.predict.measure_links import measure_links

if TYPE_CHECKING:
    from pathlib import Path

    from flexcomm import World
    from flexdemo.predict.calibration import Compute

__all__ = ["calibrate", "measure"]


def calibrate(file: Path, workload: str | None = None, compute: Compute | None = None) -> tuple[bool, Calibration]:
    """Measure on all ranks that were started, write ``file`` on rank 0; return whether we are that, and the figures.

    ``compute`` are figures that are known already; else ``workload`` is timed, or a small transformer.
    """
    # Before ranks join: one that fails alone afterwards leaves the others waiting.
    step = load_workload(workload) if workload else None
    with flexcomm.connect() as world:
        world.agree({"workload": workload, "compute": None if compute is None else str(compute)})
        if compute is None:
            step = step or SmallTransformer(world.device)
            compute = measure_compute(world, step, workload or DEFAULT_NAME)
        calibration = measure(world, compute)
        first = world.topology.rank == 0
        remarks = _describe(world)
    if first:
        write_calibration(calibration, remarks, file)
    return first, calibration


def measure(world: World, compute: Compute) -> Calibration:
    """Return the same on every rank: links and compression, beside the compute times that are known."""
    place = world.topology
    return Calibration(
        nodes=place.nodes,
        ranks_per_node=place.local_size,
        links=measure_links(world),
        compute=compute,
        codec=measure_codec(world),
    )


def _describe(world: World) -> dict[str, object]:
    """Return what a reader needs to know of the run; nothing that names the machine."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "launcher": world.topology.launcher,
        "inter": world.inter.name,
        "intra": world.intra.name,
        "device": world.device.type,
        "flexcomm": flexcomm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
