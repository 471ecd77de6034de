"""The sections of the report: what each runs, as processes of its own, and why some cannot run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.cluster.launchers import Launcher, mpirun_command
from bench.gpu.machine import Machine

_PYTHON = (sys.executable, "-m")
_TOOLS = ("memcheck", "racecheck", "synccheck")
_NO_AWARENESS = {"OMPI_MCA_opal_cuda_support": "0", "MPIR_CVAR_ENABLE_GPU": "0"}
"""How Open MPI and MPICH are told to leave device memory alone; then the library stages it."""
_LIMIT_S = 300.0
_LONG_LIMIT_S = 1800.0
_SHARED = 4


@dataclass(frozen=True)
class Section:
    """A command with a time limit. ``skipped`` says why it cannot run; then there is no command."""

    name: str
    command: Sequence[str] = ()
    limit_s: float = _LIMIT_S
    env: Mapping[str, str] = field(default_factory=dict)
    skipped: str = ""


def plan_sections(machine: Machine, *, quick: bool = False) -> list[Section]:
    """Return all sections, in the order of the report. ``quick`` leaves out what takes longest."""
    # Two nodes, whatever the number of devices: sums of two have no order, so that bits can be compared.
    per_node = max(1, len(machine.devices) // 2)
    ranks = 2 * per_node
    shares = len(machine.devices) < ranks
    has_cupy = "" if "CuPy" in machine.has else "no CuPy"
    no_nccl = "no NCCL" if "NCCL" not in machine.has else "NCCL needs a GPU for each rank" if shares else ""
    first_device = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    return [
        _on_device("kernels: laws", "kernels", has_cupy, _LONG_LIMIT_S),
        *(_sanitized(machine, tool, has_cupy, quick=quick) for tool in _TOOLS),
        _on_ranks("transport: NCCL", "transport", ranks, per_node, skipped=no_nccl, words=("nccl", "nccl")),
        _on_ranks("transport: gloo, staged", "transport", ranks, per_node, words=("gloo", "gloo")),
        *_over_mpi(machine, ranks, per_node),
        *(
            _on_ranks(f"{law.replace('_', ' ')}: {ranks} ranks", law, ranks, per_node)
            for law in ("sync", "mixing", "fsdp2_hook", "ddp_hook", "checkpoint")
        ),
        _on_ranks("sync: 4 ranks on 1 GPU", "sync", _SHARED, _SHARED // 2, env=first_device),
        _on_ranks("host reads of a step", "host_reads", ranks, per_node, words=() if no_nccl else ("nccl", "nccl")),
        _on_device("instructions, counted", "count", "" if shutil.which("g++") else "no g++", _LONG_LIMIT_S),
        _on_device("speed", "speed", has_cupy),
        _on_ranks("overlap of the FSDP2 hook", "overlap", ranks, per_node),
    ]


def _on_device(name: str, what: str, skipped: str, limit_s: float = _LIMIT_S) -> Section:
    return Section(name, () if skipped else (*_PYTHON, "bench.gpu.one_device", what), limit_s, skipped=skipped)


def _sanitized(machine: Machine, tool: str, skipped: str, *, quick: bool) -> Section:
    skipped = skipped or ("" if machine.sanitizer else "no compute-sanitizer") or ("--quick" if quick else "")
    # Its exit code says what the tool found; the laws' own outcome is in the results.
    command = (machine.sanitizer, "--tool", tool, "--error-exitcode", "9", *_PYTHON, "bench.gpu.one_device", "few")
    return Section(f"kernels: {tool}", () if skipped else command, _LONG_LIMIT_S, skipped=skipped)


def _over_mpi(machine: Machine, ranks: int, per_node: int) -> list[Section]:
    if not machine.mpis:
        return [Section("transport: MPI", skipped="no MPI")]
    return [
        _on_ranks(f"{what}: {mpi}{how}", law, ranks, per_node, launcher=mpi, env=env, words=words)
        for mpi in machine.mpis
        for what, law, words in (("transport", "transport", ("mpi", "mpi")), ("sync", "sync", ("auto", "mpi")))
        for how, env in (("", {}), (", not CUDA-aware", _NO_AWARENESS))
    ]


def _on_ranks(
    name: str,
    law: str,
    ranks: int,
    per_node: int,
    *,
    launcher: Launcher = "torchrun",
    words: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    skipped: str = "",
) -> Section:
    """Return a section of several ranks; ``words`` are the transports inside and between nodes."""
    if skipped:
        return Section(name, skipped=skipped)
    start = mpirun_command(launcher, ranks)
    variables = {**start.env, **(env or {}), "FLEXCOMM_RANKS_PER_NODE": str(per_node)}
    return Section(name, (*start.argv, *_PYTHON, "bench.gpu.ranks", law, *words), env=variables)
