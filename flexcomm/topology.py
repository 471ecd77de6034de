"""Rank, node and local rank, from what the launcher announced. Nothing here communicates.

A launcher tells each rank about itself only, :func:`read_launcher`; from what all were told, :func:`arrange` finds out
which ranks share a node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise

from torch.distributed.device_mesh import DeviceMesh

from flexcomm.errors import TopologyError

RANKS_PER_NODE_VARIABLE = "FLEXCOMM_RANKS_PER_NODE"  # overrides what the launcher says
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
        ranks = list(chain.from_iterable(self.members))
        if len(set(ranks)) != len(ranks) or self.rank not in ranks:
            raise TopologyError(f"rank {self.rank} is on no node, or a rank stands twice on nodes: {self.members}.")

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


LAUNCHERS = {
    # Hydra announces MPI_LOCAL*; Cray's PMI says PMI_LOCAL_*; others say neither, and then the MPI must be asked.
    "openmpi": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE - OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpich": "PMI_RANK PMI_SIZE - MPI_LOCALRANKID|PMI_LOCAL_RANK MPI_LOCALNRANKS|PMI_LOCAL_SIZE",
    "torchrun": "RANK WORLD_SIZE GROUP_RANK LOCAL_RANK LOCAL_WORLD_SIZE",
    "slurm": "SLURM_PROCID SLURM_STEP_NUM_TASKS|SLURM_NTASKS SLURM_NODEID SLURM_LOCALID -",
}
"""Variables for rank, size, node, local rank and local size (``-``: none); of several, the first that is set counts."""
MPI_LAUNCHERS = ("openmpi", "mpich")


def read_launcher(environ: Mapping[str, str]) -> RankInfo:
    """Return what the innermost launcher says of this rank.

    Launchers nest (``srun torchrun``, ``mpirun`` inside an allocation), and each leaves its variables behind. torchrun
    is innermost where it appears; an MPI's variables come before those of the Slurm step that started its daemons.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return rank_info_from("torchrun", environ)
    openmpi, pmi = (rank_info_if_any(launcher, environ) for launcher in MPI_LAUNCHERS)
    # A batch script outside `srun` has the job's variables, but is one process.
    is_slurm_step = "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ
    slurm = rank_info_from("slurm", environ) if is_slurm_step else None
    # `srun --mpi=pmi2` sets PMI_* too, and Slurm then knows more. Hydra, whose proxies srun may start, tells them.
    if pmi and slurm and pmi.local_rank is None and (pmi.rank, pmi.size) == (slurm.rank, slurm.size):
        pmi = None
    found = openmpi or pmi or slurm
    if found is None:
        return read_without_launcher(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        by_hand = rank_info_from("torchrun", environ)
        if (found.rank, found.size) != (by_hand.rank, by_hand.size):
            raise TopologyError(
                f"{found.launcher} says rank {found.rank} of {found.size}, but RANK and WORLD_SIZE say rank "
                f"{by_hand.rank} of {by_hand.size}: unset RANK and WORLD_SIZE, or make them agree."
            )
    return found


def read_without_launcher(environ: Mapping[str, str]) -> RankInfo:
    by_hand = rank_info_if_any("torchrun", environ)
    if by_hand is not None:
        return replace(by_hand, launcher="environment")
    if "PMIX_RANK" in environ:
        raise TopologyError(
            f"a PMIx launcher started this process (PMIX_RANK={environ['PMIX_RANK']}), but gave no size. Start "
            f"with mpirun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."
        )
    return RankInfo("none", node=0, local_rank=0, local_size=1)


def rank_info_if_any(launcher: str, environ: Mapping[str, str]) -> RankInfo | None:
    rank, size, _, *local = variables_of(launcher)
    return rank_info_from(launcher, environ) if any(name in environ for name in chain(rank, size, *local)) else None


def variables_of(launcher: str) -> list[list[str]]:
    return [names.split("|") for names in LAUNCHERS[launcher].split()]


def rank_info_from(launcher: str, environ: Mapping[str, str]) -> RankInfo:
    """Return what ``launcher`` announced; raise unless it is complete, and can be true."""
    variables = variables_of(launcher)
    rank, size, node, local_rank, local_size = (first_number(names, environ) for names in variables)
    seen = ", ".join(f"{name}={environ[name]}" for name in chain(*variables) if name in environ)
    if rank is None or size is None:
        missing = [name for name in chain(*variables[:2]) if name not in environ]
        raise TopologyError(
            f"{launcher} announced only part of this rank's place: {seen or 'nothing'}, but not "
            f"{' and '.join(missing)}. Start the program through the launcher itself, or unset the variables above."
        )
    if launcher == "slurm":
        tasks = expand_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        seen += f", SLURM_STEP_TASKS_PER_NODE={tasks}"
        local_size = tasks[node] if node is not None and node < len(tasks) else None
    if not (rank < size and (local_rank or 0) < (size if local_size is None else local_size) <= size):
        raise TopologyError(
            f"{launcher} announced an impossible place: {seen}. A rank is below its size, and a node holds no "
            f"more ranks than there are. Variables of an outer launcher or an earlier run may be left over: unset them."
        )
    return RankInfo(launcher, rank, size, node, local_rank, local_size)


def expand_tasks_per_node(text: str) -> list[int]:
    """``"2(x3),1"`` becomes ``[2, 2, 2, 1]``, as Slurm abbreviates it."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, repeat in counts for _ in range(int(repeat or 1))]


def first_number(names: Sequence[str], environ: Mapping[str, str]) -> int | None:
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

    Where nodes are numbered, ranks may lie on them in any order. Where they are not (every ``mpirun``), only blocks of
    consecutive ranks are recognised, by their local ranks counting up from 0.
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


def place_of(rank: int, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of a rank's node and its local rank, as far as the launcher tells; -1 for what it does not."""
    ranks_per_node = first_number([RANKS_PER_NODE_VARIABLE], environ)
    if ranks_per_node:
        return divmod(rank, ranks_per_node)
    told = read_launcher(environ)
    if told.launcher == "none":
        return -1, -1
    return tuple(-1 if number is None else number for number in (told.node, told.local_rank))  # type: ignore[return-value]


def group_by_node(places: Sequence[tuple[int, int, int]]) -> Members:
    """Return positions by node; a place is a node, a local rank, and a number that is the host's.

    Where no node was told, the ranks of one host are on one node, unless a local rank comes twice.
    """
    nodes: dict[tuple[int, ...], list[int]] = {}
    met: dict[tuple[int, int], int] = {}
    for position, (node, local_rank, host) in enumerate(places):
        times = 0 if local_rank < 0 else met.get((host, local_rank), 0)
        met[host, local_rank] = times + 1
        nodes.setdefault((host, times) if node < 0 else (node,), []).append(position)
    return tuple(map(tuple, nodes.values()))


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
            f"(inside a node): name them by mesh_dim_names=, pass inter= and intra=, or slice the two out of a mesh."
        )
    rows = (mesh.mesh if names[0] == inter else mesh.mesh.T).tolist()
    # A slice of a larger job counts its own ranks from 0.
    position = {rank: number for number, rank in enumerate(sorted(chain.from_iterable(rows)))}
    if rank not in position:
        raise TopologyError(f"rank {rank} is not in this mesh of ranks {rows}: let only its ranks call connect_mesh.")
    return Topology(position[rank], tuple(tuple(position[rank] for rank in row) for row in rows), "mesh")
