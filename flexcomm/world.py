"""The world of one job: this rank's place, and its transports inside the node and between nodes."""

from __future__ import annotations

import logging
import os
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from flexcomm.bootstrap.consistency import ConsistencyCheck, digest_of
from flexcomm.bootstrap.groups import (
    GroupFactory,
    TransportName,
    check_devices_are_apart,
    check_timeout,
    check_transport_argument,
)
from flexcomm.bootstrap.job import abort_job_on_exception, join_mpi_job, place_in_shared_memory
from flexcomm.device import HOST, backend_for, current_device, find_native, identify, native_backend, own_device
from flexcomm.errors import ConfigMismatchError, TopologyError, TransportUnavailableError
from flexcomm.stats import SyncRecord
from flexcomm.topology import (
    RANKS_PER_NODE_VARIABLE,
    Members,
    RankInfo,
    Topology,
    arrange,
    blocks,
    first_number,
    from_mesh,
    read_launcher,
)
from flexcomm.transport import LoopbackTransport
from flexcomm.transport.base import describe_transport
from flexcomm.versions import __version__, log_untested_version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpi4py import MPI
    from torch.distributed.device_mesh import DeviceMesh

    from flexcomm.transport import Transport

TIMEOUT_S = 300.0
UNKNOWN = -1

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class World:
    """All ranks of a job.

    ``intra`` joins the ranks of this node, ``inter`` those that hold this local rank on every node, and they carry the
    data. Settings and outcomes are host tensors, which not all of these carry: ``control`` joins all ranks through host
    memory, ``intra_control`` and ``inter_control`` those of ``intra`` and ``inter``. A ``with`` block closes the world
    at its end, but not after an exception: closing takes all ranks, and the others may be waiting elsewhere.
    """

    topology: Topology
    intra: Transport
    inter: Transport
    control: Transport
    intra_control: Transport
    inter_control: Transport
    device: torch.device
    _consistency: ConsistencyCheck
    _clone: Callable[[], tuple[Transport, Transport]]  # makes a second transport for `intra` and for `inter`
    _cannot_clone: str = ""  # what has no second transport, if anything
    _closers: ExitStack = field(default_factory=ExitStack)
    _total: SyncRecord = field(default_factory=SyncRecord)
    _recent: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=256))

    def __post_init__(self) -> None:
        self._inter_consistency = ConsistencyCheck(self.inter_control)

    def __repr__(self) -> str:
        intra, inter = describe_transport(self.intra), describe_transport(self.inter)
        return f"World({self.topology}; intra {intra}, inter {inter}, on {self.device})"

    def agree(self, fields: Mapping[str, object]) -> None:
        """Return when ``fields`` are equal on all ranks, else raise ``ConfigMismatchError`` on all of them.

        One small collective when these values are new, none when they were agreed before: ranks that use different
        values, each agreed earlier, are not found here.
        """
        self._consistency.check(fields)

    def agree_inter(self, fields: Mapping[str, object]) -> None:
        """Do as :meth:`agree` does, among the ranks of ``inter``."""
        self._inter_consistency.check(fields)

    def stats(self) -> dict[str, float]:
        """Return what all synchronisations of this rank came to: bytes, seconds, collectives."""
        return self._total.as_dict()

    def recent_syncs(self) -> list[dict[str, float]]:
        """Return the statistics of the last 256 synchronisations, one by one."""
        return list(self._recent)

    def add_stats(self, record: SyncRecord, **remarks: int) -> None:
        """Add a synchronisation to the statistics; ``remarks`` are remembered with it."""
        self._total.add(record)
        self._recent.append({**remarks, **record.as_dict()})

    def node_only(self) -> World:
        """Return this rank's node as a world of its own, which ends with this one. All nodes use theirs alike."""
        inter = LoopbackTransport(self.inter.timeout_s)
        topology = replace(self.topology, members=(self.topology.members[self.topology.node],))
        return replace(
            self,
            topology=topology,
            inter=inter,
            inter_control=inter,
            _cannot_clone="a part of a world",
            _closers=ExitStack(),
        )

    @property
    def can_clone_groups(self) -> bool:
        """Whether :meth:`clone_groups` is possible: not for a part of a world, or a transport without ``clone()``."""
        return not self._cannot_clone

    def clone_groups(self) -> World:
        """Return the same ranks with process groups (communicators) of their own; they end with this world.

        All ranks call it together. Collectives on one set of groups do not order those on the other. A transport that
        was passed to :func:`connect` is asked for its ``clone()``.

        Raises:
            TransportUnavailableError: a transport that was passed has no ``clone()``, or this is a part of a world.

        """
        # Checked first, for making a group takes all ranks.
        if self._cannot_clone:
            raise TransportUnavailableError(
                f"clone_groups() needs second groups, which {self._cannot_clone} cannot make. Give a transport of your "
                f"own a method clone() that returns another one on the same ranks; of a part of a world, clone the "
                f"whole."
            )
        intra, inter = self._clone()
        return replace(self, intra=intra, inter=inter, _closers=ExitStack())

    def with_transports(
        self, *, inter: Callable[[Transport], Transport], control: Callable[[Transport], Transport]
    ) -> World:
        """Return the same ranks with what the functions make of ``inter``, its later clones, and ``control``.

        All ranks call it. Either world closes both.
        """
        new_control = control(self.control)

        def clone() -> tuple[Transport, Transport]:
            cloned_intra, cloned_inter = self._clone()
            return cloned_intra, inter(cloned_inter)

        consistency = ConsistencyCheck(new_control)
        return replace(
            self,
            inter=inter(self.inter),
            inter_control=inter(self.inter_control),
            control=new_control,
            _consistency=consistency,
            _clone=clone,
        )

    def at_close(self, closer: Callable[[], None]) -> None:
        """Have ``closer`` called first when this world is closed."""
        self._closers.callback(closer)

    def close(self) -> None:
        """Destroy the groups this world made. All ranks call it; calling again does nothing."""
        self._closers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


def connect(
    *,
    intra: TransportName | Transport = "auto",
    inter: TransportName | Transport = "auto",
    ranks_per_node: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> World:
    """Join the ranks that mpirun, torchrun or srun started; a process started by none of them is a world of one.

    Where a launcher was found, torch's default process group is started too, unless it is there.

    Args:
        intra: what joins the ranks of a node: ``"nccl"``, ``"gloo"``, ``"mpi"``, or ``"auto"``, which carries CUDA
            tensors by NCCL and host tensors by MPI under mpirun, else by gloo. Or a transport of your own, an object
            with the methods of :class:`flexcomm.Transport` that joins these ranks: it is used as it is and left open.
        inter: the same for the ranks that hold this local rank on every node.
        ranks_per_node: split the ranks into nodes of that many, whatever the hosts are; without it, the variable
            ``FLEXCOMM_RANKS_PER_NODE``, else what the launcher says.
        timeout_s: no wait on this world blocks longer. A transport of your own has its own.

    Raises:
        ConfigMismatchError: ranks passed different arguments; of a transport, its type and name are compared.
        InvalidArgumentError: there is no such transport, or the object has not all methods of one.
        TopologyError: nodes hold different numbers of ranks, or a transport of your own joins others. On all ranks.
        TransportUnavailableError: the machine lacks what was named, NCCL was named but ranks share a device, or the
            ranks could not be joined in time.

    Example::

        world = flexcomm.connect(inter=MyTransport(...), ranks_per_node=2)

    """
    abort_job_on_exception()  # First: a rank that fails alone would wait for the others in MPI_Finalize.
    check_transport_argument("intra", intra)
    check_transport_argument("inter", inter)
    check_timeout(timeout_s)
    rank_info = read_rank_info()
    if rank_info.rank == 0:
        log_untested_version()
    if ranks_per_node is None:
        ranks_per_node = first_number([RANKS_PER_NODE_VARIABLE], os.environ)
    comm = join_mpi_job(rank_info, required="mpi" in (intra, inter))
    factory = GroupFactory(rank_info, comm, timeout_s)
    try:
        return assemble(factory, intra, inter, ranks_per_node)
    except (ConfigMismatchError, TopologyError):
        factory.closers.close()  # Safe though closing takes all ranks: these two are raised by all of them.
        raise


@lru_cache(maxsize=1)
def default_world() -> World:
    """Return the world of calls that name none, connected when first needed."""
    return connect()


def assemble(
    factory: GroupFactory,
    intra: TransportName | Transport,
    inter: TransportName | Transport,
    ranks_per_node: int | None,
) -> World:
    """Join all ranks, let them compare what they were told, then join those of a node, and those between nodes."""
    rank_info = factory.rank_info
    control = factory.join_everybody()
    consistency = ConsistencyCheck(control)
    consistency.check(
        {
            "flexcomm version": __version__,
            "launcher": rank_info.launcher,
            "intra": intra if isinstance(intra, str) else describe_transport(intra),
            "inter": inter if isinstance(inter, str) else describe_transport(inter),
            "ranks_per_node": ranks_per_node,
            "timeout_s": factory.timeout_s,
            "native backend": native_backend(),
        }
    )
    if ranks_per_node is None:
        members = find_members(rank_info, control, factory.comm)
    else:
        members = blocks(rank_info.size, ranks_per_node)
    topology = Topology(rank_info.rank, members, rank_info.launcher)
    check_passed_transports(topology, intra, inter, control)
    # `ranks_per_node` may split a host into several nodes, whose local ranks must not meet on one device.
    device = own_device(topology.local_rank if rank_info.local_rank is None else rank_info.local_rank)
    if native_backend() is not None:
        devices = gather_devices(control, device)
        intra = factory.avoid_shared_devices("intra", intra, topology.members, devices)
        inter = factory.avoid_shared_devices("inter", inter, topology.inter_groups, devices)
    made = factory.make(intra, topology.members), factory.make(inter, topology.inter_groups)
    world = World(
        topology,
        *made,
        control,
        factory.make_control(intra, made[0], topology.members),
        factory.make_control(inter, made[1], topology.inter_groups),
        device,
        consistency,
        _clone=lambda: (factory.clone(intra, topology.members), factory.clone(inter, topology.inter_groups)),
        _cannot_clone=" and ".join(
            f"{describe_transport(one)}, passed as {leg},"
            for leg, one in (("intra", intra), ("inter", inter))
            if not (isinstance(one, str) or hasattr(one, "clone"))
        ),
        _closers=factory.closers,
    )
    log.info("%r", world)
    return world


def gather_devices(control: Transport, device: torch.device) -> list[bytes]:
    """Return digests that are equal for ranks on one device, by rank."""
    own = torch.frombuffer(bytearray(digest_of(identify(device))), dtype=torch.uint8)
    return [row.numpy().tobytes() for row in control.all_gather(own).wait()]


def check_passed_transports(
    topology: Topology, intra: TransportName | Transport, inter: TransportName | Transport, control: Transport
) -> None:
    """Raise on all ranks unless the transports that were passed join the ranks that the topology says."""
    if isinstance(intra, str) and isinstance(inter, str):
        return
    legs = (("intra", intra, topology.local_rank, topology.local_size), ("inter", inter, topology.node, topology.nodes))
    wrong = [
        f"{describe_transport(one)} was passed as {leg}, with rank {one.rank} of {one.size}, but needed is rank {rank} "
        f"of {size}"
        for leg, one, rank, size in legs
        if not isinstance(one, str) and (one.rank, one.size) != (rank, size)
    ]
    # A rank that raised alone would leave the others waiting in the next group that is made.
    counts = control.all_gather(torch.tensor(len(wrong))).wait()
    if ranks := counts.nonzero().view(-1).tolist():
        said = "; ".join(wrong) or f"the transports passed on ranks {ranks[:16]} do not join the ranks they must"
        raise TopologyError(
            f"rank {topology.rank}: {said}. intra joins the ranks of a node by local rank, inter those of equal local "
            f"rank by node; pass a transport that does, or check ranks_per_node."
        )


def connect_mesh(
    mesh: DeviceMesh, *, inter: str = "replicate", intra: str = "shard", timeout_s: float = TIMEOUT_S
) -> World:
    """Return the world of a two-dimensional mesh, whose groups carry the data. Closing it leaves them open.

    Args:
        mesh: torch's DeviceMesh, of all ranks or of some.
        inter: the axis across nodes.
        intra: the axis inside a node.
        timeout_s: no wait on this world blocks longer.

    Raises:
        ConfigMismatchError: ranks passed different arguments, or meshes.
        InvalidArgumentError: ``timeout_s`` is not a positive number.
        TopologyError: the mesh has other axes, or this rank is not in it.
        TransportUnavailableError: ranks share a device, or could not be joined in time.

    Example::

        mesh = init_device_mesh(device_type, (nodes, local), mesh_dim_names=("replicate", "shard"))
        world = flexcomm.connect_mesh(mesh, inter="replicate", intra="shard")

    """
    abort_job_on_exception()
    check_timeout(timeout_s)
    topology = from_mesh(mesh, rank=dist.get_rank(), inter=inter, intra=intra)
    if topology.rank == 0:
        log_untested_version()
    groups = mesh.get_group(intra), mesh.get_group(inter)
    return join_groups(topology, sorted(mesh.mesh.flatten().tolist()), mesh.device_type, timeout_s, groups)


def join_groups(
    topology: Topology,
    ranks: Sequence[int],
    device_type: str,
    timeout_s: float,
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
) -> World:
    """Return the world of some of torch's ranks, who alone call it; what it makes stays until torch closes.

    Args:
        topology: their places; its ranks count from 0.
        ranks: what torch calls them.
        device_type: of the tensors.
        timeout_s: no wait on this world blocks longer.
        groups: carry the data inside nodes and between them; new ones, if not given.

    """
    factory = GroupFactory(RankInfo(topology.launcher, dist.get_rank(), dist.get_world_size()), None, timeout_s)
    is_whole_job, backend = len(ranks) == dist.get_world_size(), backend_for(device_type)
    control = factory.make("gloo", [ranks]) if is_whole_job else factory.join(ranks, "gloo")
    consistency = ConsistencyCheck(control)
    consistency.check({"flexcomm version": __version__, "members": topology.members, "timeout_s": timeout_s})
    device = current_device(device_type)
    if find_native(backend) is not HOST:
        devices = gather_devices(control, device)
        check_devices_are_apart("intra", backend, topology.members, devices)
        check_devices_are_apart("inter", backend, topology.inter_groups, devices)
    # They carry host tensors, too, such as parameters that FSDP keeps on the host, and so need no others for control.
    own = topology.members[topology.node], topology.inter_groups[topology.local_rank]
    intra, inter = ([ranks[member] for member in members] for members in own)

    def join() -> tuple[Transport, Transport]:
        return factory.join(intra, backend), factory.join(inter, backend)

    legs = join() if groups is None else (factory.wrap(groups[0], backend), factory.wrap(groups[1], backend))
    return World(topology, *legs, control, *legs, device, consistency, _clone=join, _closers=factory.closers)


def read_rank_info() -> RankInfo:
    """Return what the launcher says; without one, what torch was told."""
    rank_info = read_launcher(os.environ)
    if not dist.is_initialized():
        return rank_info
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank_info.launcher == "none":
        return RankInfo("torch", rank, size)
    if (rank, size) != (rank_info.rank, rank_info.size):
        raise TopologyError(
            f"torch.distributed is started with rank {rank} of {size}, but {rank_info.launcher} announced rank "
            f"{rank_info.rank} of {rank_info.size}: start it with the launcher's numbers, or let connect() start it."
        )
    return rank_info


def find_members(rank_info: RankInfo, control: Transport, comm: MPI.Intracomm | None) -> Members:
    """Return the ranks of every node, from the launcher; from MPI, where the launcher does not tell."""

    def gather_and_arrange(*place: int | None) -> Members | None:
        mine = torch.tensor([UNKNOWN if number is None else number for number in place])
        rows = control.all_gather(mine).wait().tolist()
        places = [[None if number == UNKNOWN else number for number in row] for row in rows]
        return arrange([RankInfo(rank_info.launcher, rank, len(rows), *row) for rank, row in enumerate(places)])

    members = gather_and_arrange(rank_info.node, rank_info.local_rank, rank_info.local_size)
    if members is None and comm is not None:
        members = gather_and_arrange(*place_in_shared_memory(comm))
    if members is None:
        raise TopologyError(
            f"{rank_info.launcher} did not tell which ranks share a node: {rank_info}. Pass ranks_per_node= to "
            f"flexcomm.connect, set LOCAL_RANK and LOCAL_WORLD_SIZE, or install mpi4py under mpirun."
        )
    return members
