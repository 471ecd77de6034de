"""What every rank of a section runs: ``python -m bench.gpu.ranks LAW [INTRA INTER]``; rank 0 speaks for all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import flexcomm
from bench.gpu.laws import LAWS
from bench.gpu.results import Result, emit, try_law
from bench.gpu.steps import measure_host_reads, measure_overlap
from flexcomm import World
from flexcomm.bootstrap.groups import TransportName
from flexcomm.transport.mpi import mpi_is_gpu_aware

_TIMEOUT_S = 120.0


def main(law: str, intra: TransportName = "auto", inter: TransportName = "auto") -> int:
    """Return the exit code of this rank."""
    with flexcomm.connect(intra=intra, inter=inter, timeout_s=_TIMEOUT_S) as world:
        speaks = world.topology.rank == 0
        # The first law that is broken ends it: this rank no longer does what the others do.
        held = all(try_law(one.__name__, partial(one, world), speaks=speaks) for one in LAWS.get(law, ()))
        results = _measure(law, world)
        for result in results if speaks else ():
            emit(result)
        if speaks and law == "transport":
            emit(Result("transports", holds=None, said=_describe(world)))
        return 0 if held and not any(result.holds is False for result in results) else 1


def _measure(law: str, world: World) -> Sequence[Result]:
    if law == "host_reads":
        return measure_host_reads(world)
    return measure_overlap(world) if law == "overlap" else ()


def _describe(world: World) -> str:
    said = f"intra {world.intra.name}, inter {world.inter.name}"
    if world.inter.name != "mpi":
        return said
    return f"{said}, {'given' if mpi_is_gpu_aware() else 'never given'} device memory"


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))  # type: ignore[arg-type]  # connect() refuses names that are none.
