"""Rank, node and local rank, from what the launcher announced. Nothing here communicates.

A launcher tells each rank about itself only: :func:`read_launcher`. ``flexcomm.connect`` gathers what all ranks were
told and hands it to :func:`arrange`, which finds out which ranks share a node.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from flexcomm.errors import TopologyError

RANKS_PER_NODE_VARIABLE = "FLEXCOMM_RANKS_PER_NODE"
"""Overrides what the launcher says, for programs whose source cannot be changed."""
Members = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Topology:
    """The place of one rank among all: ``members[node][local_rank]`` is a rank."""

    rank: int
    members: Members
    launcher: str

    def __post_init__(self) -> None:
        counts = [len(ranks) for ranks in self.members]
        if len(set(counts)) != 1 or counts[0] == 0:
            shown = ", ".join(f"node {node}: {count}" for node, count in enumerate(counts[:16]))
            more = f", and {len(counts) - 16} nodes more" if len(counts) > 16 else ""
            raise TopologyError(
                f"nodes hold different numbers of ranks: {shown}{more}. Rank i of every node is paired with "
                f"rank i of the others, so start the same number on each (mpirun --map-by ppr:N:node, mpirun -ppn N, "
                f"torchrun --nproc-per-node N, srun --ntasks-per-node N)."
            )
        times = Counter(chain.from_iterable(self.members))
        repeated = [rank for rank, count in times.items() if count > 1]
        if repeated:
            raise TopologyError(f"ranks {repeated} stand on more than one node or twice on one: {self.members}.")
        if self.rank not in times:
            raise TopologyError(f"rank {self.rank} is on no node of {self.members}.")

    @property
    def size(self) -> int:
        return self.nodes * self.local_size

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def local_size(self) -> int:
        return len(self.members[0])

    @property
    def node(self) -> int:
        return next(node for node, ranks in enumerate(self.members) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        return self.members[self.node].index(self.rank)

    @property
    def inter_groups(self) -> Members:
        """The ranks of equal local rank: ``inter_groups[local_rank][node]``."""
        return tuple(zip(*self.members, strict=True))

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.size}: node {self.node} of {self.nodes}, "
            f"local rank {self.local_rank} of {self.local_size} ({self.launcher})"
        )


@dataclass(frozen=True)
class RankInfo:
    """The place of one rank, as its launcher announced it; ``None`` where it announced nothing."""

    launcher: str
    rank: int = 0
    size: int = 1
    node: int | None = None
    local_rank: int | None = None
    local_size: int | None = None


class Launcher(NamedTuple):
    """The variables in which a launcher announces a rank's place; of several, the first that is set counts."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    node: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()


OPENMPI = Launcher(
    "openmpi",
    rank=("OMPI_COMM_WORLD_RANK",),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
# Hydra announces MPI_LOCAL*; Cray's PMI says PMI_LOCAL_*; others say neither, and then the MPI must be asked.
PMI = Launcher(
    "mpich",
    rank=("PMI_RANK",),
    size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
TORCHRUN = Launcher(
    "torchrun",
    rank=("RANK",),
    size=("WORLD_SIZE",),
    node=("GROUP_RANK",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE",),
)
SLURM = Launcher(
    "slurm",
    rank=("SLURM_PROCID",),
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    node=("SLURM_NODEID",),
    local_rank=("SLURM_LOCALID",),
)
MPI_LAUNCHERS = (OPENMPI.name, PMI.name)


def read_launcher(environ: Mapping[str, str]) -> RankInfo:
    """Return what the innermost launcher says of this rank.

    Launchers nest (``srun torchrun``, ``mpirun`` inside an allocation), and each leaves its variables behind. torchrun
    marks its children, so it is innermost where it appears; an MPI's variables come before those of the Slurm step that
    may have started its daemons.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return rank_info_from(TORCHRUN, environ)
    openmpi, pmi = (rank_info_if_any(launcher, environ) for launcher in (OPENMPI, PMI))
    # A batch script outside `srun` has the job's variables, but is one process.
    is_slurm_step = "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ
    slurm = rank_info_from(SLURM, environ) if is_slurm_step else None
    # `srun --mpi=pmi2` sets PMI_* too, and Slurm then knows more. Hydra, whose proxies srun may start, tells them.
    if pmi and slurm and pmi.local_rank is None and (pmi.rank, pmi.size) == (slurm.rank, slurm.size):
        pmi = None
    found = openmpi or pmi or slurm
    if found is None:
        return read_without_launcher(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        by_hand = rank_info_from(TORCHRUN, environ)
        if (found.rank, found.size) != (by_hand.rank, by_hand.size):
            raise TopologyError(
                f"two launchers contradict each other: {found.launcher} says rank {found.rank} of {found.size}, RANK "
                f"and WORLD_SIZE say rank {by_hand.rank} of {by_hand.size}. Unset RANK and WORLD_SIZE, or make them "
                f"agree."
            )
    return found


def read_without_launcher(environ: Mapping[str, str]) -> RankInfo:
    by_hand = rank_info_if_any(TORCHRUN, environ)
    if by_hand is not None:
        return replace(by_hand, launcher="environment")
    if "PMIX_RANK" in environ:
        raise TopologyError(
            f"a PMIx launcher started this process (PMIX_RANK={environ['PMIX_RANK']}), but gave no size. Start "
            f"with mpirun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."
        )
    return RankInfo("none", node=0, local_rank=0, local_size=1)


def rank_info_if_any(launcher: Launcher, environ: Mapping[str, str]) -> RankInfo | None:
    names = launcher.rank + launcher.size + launcher.local_rank + launcher.local_size
    return rank_info_from(launcher, environ) if any(name in environ for name in names) else None


def rank_info_from(launcher: Launcher, environ: Mapping[str, str]) -> RankInfo:
    """Return what ``launcher`` announced; raise unless it is complete, and can be true."""
    rank, size, node, local_rank, local_size = (first_number(names, environ) for names in launcher[1:])
    seen = ", ".join(f"{name}={environ[name]}" for name in chain(*launcher[1:]) if name in environ)
    if rank is None or size is None:
        missing = [*(launcher.rank if rank is None else ()), *(launcher.size if size is None else ())]
        raise TopologyError(
            f"{launcher.name} announced only part of this rank's place: {seen or 'nothing'}, but not "
            f"{' and '.join(missing)}. Start the program through the launcher itself, or unset the variables above."
        )
    if launcher is SLURM:
        tasks = expand_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        seen += f", SLURM_STEP_TASKS_PER_NODE={tasks}"
        local_size = tasks[node] if node is not None and node < len(tasks) else None
    if not (rank < size and (local_rank or 0) < (size if local_size is None else local_size) <= size):
        raise TopologyError(
            f"{launcher.name} announced an impossible place: {seen}. A rank is below its size, and a node holds no "
            f"more ranks than there are. Variables of an outer launcher or an earlier run may be left over: unset them."
        )
    return RankInfo(launcher.name, rank, size, node, local_rank, local_size)


def expand_tasks_per_node(text: str) -> list[int]:
    """``"2(x3),1"`` becomes ``[2, 2, 2, 1]``, as Slurm abbreviates it."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, repeat in counts for _ in range(int(repeat or 1))]


def first_number(names: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Return the number in the first variable that is set, if one is."""
    for name in names:
        if name in environ:
            text = environ[name].strip()
            if not text.isdecimal():
                raise TopologyError(f"{name}={environ[name]!r} is not a whole number from 0 on. Correct or unset it.")
            return int(text)
    return None


def blocks(size: int, ranks_per_node: int) -> Members:
    """Return nodes of ``ranks_per_node`` consecutive ranks."""
    if ranks_per_node < 1 or size % ranks_per_node:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise TopologyError(
            f"ranks_per_node={ranks_per_node} does not divide the {size} ranks of this job: every node must hold the "
            f"same number. Choose one of {divisors}, or start another number of ranks."
        )
    return tuple(tuple(range(start, start + ranks_per_node)) for start in range(0, size, ranks_per_node))


def arrange(rank_infos: Sequence[RankInfo]) -> Members | None:
    """Return the ranks of every node, from what all ranks were told; ``None`` where only an MPI can tell.

    ``rank_infos[rank]`` is that rank's. Where nodes are numbered, ranks may lie on them in any order. Where they are
    not (every ``mpirun``), blocks of consecutive ranks are recognised by their local ranks counting up from 0; nothing
    else can be.
    """
    if any(one.local_rank is None for one in rank_infos):
        return None
    if all(one.node is not None for one in rank_infos):
        return members_by_number(rank_infos)
    starts = [one.rank for one in rank_infos if one.local_rank == 0]
    members = tuple(tuple(range(*ends)) for ends in pairwise([*starts, len(rank_infos)]))
    in_blocks = bool(starts) and all(
        rank_infos[rank].local_rank == place and rank_infos[rank].local_size == len(ranks)
        for ranks in members
        for place, rank in enumerate(ranks)
    )
    return members if in_blocks else None


def members_by_number(rank_infos: Sequence[RankInfo]) -> Members:
    by_place = sorted(rank_infos, key=lambda one: (one.node or 0, one.local_rank or 0))
    members = []
    for node, some in groupby(by_place, key=lambda one: one.node):
        ranks, local_ranks = zip(*((one.rank, one.local_rank) for one in some), strict=True)
        if local_ranks != tuple(range(len(ranks))):
            raise TopologyError(
                f"the ranks of node {node} announced local ranks {list(local_ranks)}; needed were 0 to "
                f"{len(ranks) - 1}, each once. If several launchers run on one host, give each a node of its own."
            )
        members.append(ranks)
    return tuple(members)


def from_mesh(mesh: DeviceMesh, *, rank: int, inter: str, intra: str) -> Topology:
    """Return the place of ``rank`` in a mesh of two axes, ``inter`` (across nodes) and ``intra`` (inside a node)."""
    names = mesh.mesh_dim_names or ()
    if sorted(names) != sorted((inter, intra)):
        raise TopologyError(
            f"the mesh has axes {names or '(unnamed)'}, needed are exactly {inter!r} (across nodes) and {intra!r} "
            f"(inside a node). Name them in init_device_mesh(..., mesh_dim_names=...), pass inter= and intra=, or "
            f"slice the two out of a larger mesh: mesh[{inter!r}, {intra!r}]."
        )
    rows = (mesh.mesh if names[0] == inter else mesh.mesh.T).tolist()
    # A slice of a larger job counts its own ranks from 0.
    position = {rank: number for number, rank in enumerate(sorted(chain.from_iterable(rows)))}
    if rank not in position:
        raise TopologyError(f"rank {rank} is not in this mesh of ranks {rows}: let only its ranks call connect_mesh.")
    return Topology(position[rank], tuple(tuple(position[rank] for rank in row) for row in rows), "mesh")
