"""Transports made from a name (``auto``, ``nccl``, ``gloo``, ``mpi``) and groups of ranks."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist

from flexcomm.bootstrap.consistency import name_ranks
from flexcomm.bootstrap.job import barrier_with_timeout, start_torch
from flexcomm.device import HOST, KINDS, current_device, find_native, native_backend
from flexcomm.errors import InvalidArgumentError, TransportUnavailableError
from flexcomm.transport import LoopbackTransport, MPITransport, PerDeviceTransport, TorchTransport, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from mpi4py import MPI

    from flexcomm.topology import RankInfo

TransportName = Literal["auto", "nccl", "gloo", "mpi"]
"""``auto``, ``mpi``, and the backends of the devices in :data:`flexcomm.device.KINDS`."""
_BACKENDS = tuple(kind.backend for kind in KINDS.values() if kind.backend is not None)

log = logging.getLogger(__name__)

_users_of_default_group = 0
"""The number of worlds that use the default process group that this library started; the last one destroys it."""


def check_transport_argument(leg: str, kind: TransportName | Transport) -> None:
    """Raise unless ``kind`` names a transport that this machine has, or is one."""
    if not isinstance(kind, str):
        missing = [name for name in vars(Transport) if not name.startswith("_") and not hasattr(kind, name)]
        if missing:
            raise InvalidArgumentError(
                f"{leg}={kind!r} is neither the name of a transport nor a transport: it has no {', '.join(missing)}. "
                f"See flexcomm.Transport, and hold yours to flexcomm.testing.check_transport."
            )
        return
    if kind not in get_args(TransportName):
        names = ", ".join(get_args(TransportName))
        raise InvalidArgumentError(f"there is no transport {kind!r}. Choose one of {names}, or pass one of your own.")
    native = find_native(kind)
    if native is not None and native is not HOST and kind != native_backend():
        raise TransportUnavailableError(
            f"{kind} needs a {native.name.upper()} device and a torch built with {kind.upper()}, but one is missing. "
            f"Use 'auto' or 'gloo', or check {native.name.upper()}_VISIBLE_DEVICES and the torch build."
        )


def check_timeout(timeout_s: float) -> None:
    if not 0 < timeout_s < float("inf"):
        raise InvalidArgumentError(f"timeout_s={timeout_s} is not a time to wait: pass a number of seconds above 0.")


def ranks_on_shared_devices(groups: Iterable[Sequence[int]], devices: Sequence[Hashable]) -> list[int]:
    """Return the ranks whose group has another one on the same device; ``devices`` are those of all ranks."""
    shared = []
    for ranks in groups:
        times = Counter(devices[rank] for rank in ranks)
        shared += [rank for rank in ranks if times[devices[rank]] > 1]
    return sorted(shared)


def check_devices_are_apart(
    leg: str, backend: str, groups: Iterable[Sequence[int]], devices: Sequence[Hashable]
) -> None:
    """Raise on all ranks if a device's own backend would have to join ranks that share a device."""
    native, shared = find_native(backend), ranks_on_shared_devices(groups, devices)
    if native not in (None, HOST) and shared:
        raise TransportUnavailableError(
            f"{leg} cannot be joined by {backend}, because {name_ranks(shared)} share devices with others of their "
            f"groups. Start no more ranks on a host than it has devices (--nproc-per-node), let each rank see its own "
            f"({native.name.upper()}_VISIBLE_DEVICES), or use flexcomm.connect({leg}='auto'), which then goes through "
            f"host memory."
        )


@dataclass
class GroupFactory:
    """Makes process groups and MPI communicators, which ``closers`` destroy."""

    rank_info: RankInfo
    comm: MPI.Intracomm | None
    timeout_s: float
    closers: ExitStack = field(default_factory=ExitStack)

    def join_everybody(self) -> Transport:
        """Return a host transport of all ranks; start torch's default process group, unless somebody has."""
        if self.rank_info.launcher == "none":
            return LoopbackTransport(self.timeout_s)
        everybody = [range(self.rank_info.size)]
        control = self._mpi(self.comm, everybody) if self.comm is not None else None
        self._use_default_group(control)
        return control or self.make("gloo", everybody)

    @property
    def host(self) -> TransportName:
        """What carries host tensors by default: any other tensor, too, through the host."""
        return "gloo" if self.comm is None else "mpi"

    def avoid_shared_devices(
        self,
        leg: str,
        kind: TransportName | Transport,
        groups: Sequence[Sequence[int]],
        devices: Sequence[Hashable],
    ) -> TransportName | Transport:
        """Return ``kind``; the host's instead of ``"auto"``, where NCCL would have to join ranks that share a device.

        All ranks come to the same result.
        """
        if kind != "auto":
            if isinstance(kind, str):
                check_devices_are_apart(leg, kind, groups, devices)
            return kind
        shared = ranks_on_shared_devices(groups, devices)
        if shared and self.rank_info.rank == 0:
            log.warning(
                "%s share devices, so %s cannot join them: %s goes over %s, through host memory",
                name_ranks(shared),
                native_backend(),
                leg,
                self.host,
            )
        return self.host if shared else kind

    def make(self, kind: TransportName | Transport, groups: Sequence[Sequence[int]]) -> Transport:
        """Return the transport of this rank's group, whose ranks are in the order given, or the one that was passed.

        All ranks of the job call it together, with the same groups, all of one size.
        """
        if not isinstance(kind, str):
            return kind
        if len(groups[0]) == 1:
            return LoopbackTransport(self.timeout_s)
        if kind in _BACKENDS:
            return self._torch(kind, groups)
        host = self._torch("gloo", groups) if self.comm is None else self._mpi(self.comm, groups)
        native = native_backend()
        if kind == "mpi" or native is None:
            return host
        return PerDeviceTransport(host, self._torch(native, groups))

    def make_control(
        self, kind: TransportName | Transport, transport: Transport, groups: Sequence[Sequence[int]]
    ) -> Transport:
        """Return what carries settings and outcomes among the ranks of ``transport``, made of ``kind``: host tensors.

        That is the transport itself, unless it carries one type of device's tensors only, or is the caller's, of which
        nobody knows that.
        """
        if isinstance(kind, str) and find_native(kind) in (None, HOST):
            return transport
        return self.make(self.host, groups)

    def clone(self, kind: TransportName | Transport, groups: Sequence[Sequence[int]]) -> Transport:
        if isinstance(kind, str):
            return self.make(kind, groups)
        clone: Callable[[], Transport] = kind.clone  # type: ignore[attr-defined]  # Checked by World.clone_groups.
        return clone()

    def wrap(self, group: dist.ProcessGroup, backend: str) -> Transport:
        """Return a transport over a group that the caller made and will destroy, and for host tensors over another."""
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return LoopbackTransport(self.timeout_s)
        return self._with_host(self._transport_of(group, backend), ranks)

    def join(self, ranks: Sequence[int], backend: str) -> Transport:
        """Return a transport of ``ranks``, who alone call it, for host tensors, too. It is never closed.

        [Note: group names] torch names a group that only its members make by its ranks and the number of groups that
        this process is in. Ranks that are in different numbers of groups never meet, and a name comes back after a
        group was destroyed, to find the old one's addresses in the store. So such a group stays until torch closes.
        """
        if len(ranks) == 1:
            return LoopbackTransport(self.timeout_s)
        group = self._new_group(ranks, backend, members_only=True)
        return self._with_host(self._transport_of(group, backend), ranks)

    def _with_host(self, transport: TorchTransport, ranks: Sequence[int]) -> Transport:
        is_host = find_native(transport.name) is HOST
        return transport if is_host else PerDeviceTransport(self.join(ranks, "gloo"), transport)

    def _mpi(self, comm: MPI.Intracomm, groups: Sequence[Sequence[int]]) -> MPITransport:
        color = self._own(groups)
        barrier_with_timeout(comm, self.timeout_s)
        transport = MPITransport(comm.Split(color, groups[color].index(self.rank_info.rank)), self.timeout_s)
        self.closers.callback(transport.close)
        return transport

    def _torch(self, backend: str, groups: Sequence[Sequence[int]]) -> TorchTransport:
        # Every rank makes every group, because of [Note: group names].
        made = [self._new_group(ranks, backend) for ranks in groups]
        transport = self._transport_of(made[self._own(groups)], backend)
        self.closers.callback(transport.close)
        return transport

    def _transport_of(self, group: dist.ProcessGroup, backend: str) -> TorchTransport:
        transport, kind = TorchTransport(group, backend, self.timeout_s), find_native(backend)
        if kind not in (None, HOST):
            # NCCL makes a communicator in a group's first call, for which all ranks must come; a round of gossip may
            # leave some out (https://docs.pytorch.org/docs/stable/distributed.html, batch_isend_irecv).
            transport.all_reduce(torch.zeros(1, device=current_device(kind.name))).wait()
        return transport

    def _new_group(self, ranks: Sequence[int], backend: str, *, members_only: bool = False) -> dist.ProcessGroup:
        # A device's backend ends the process when its time is up, later than a wait that began in time raises.
        times = 1 if find_native(backend) is HOST else 2
        timeout = timedelta(seconds=times * self.timeout_s)
        try:
            group: dist.ProcessGroup = dist.new_group(
                list(ranks), timeout, backend, use_local_synchronization=members_only, sort_ranks=False
            )
        except (dist.DistError, RuntimeError) as error:
            raise TransportUnavailableError(
                f"rank {self.rank_info.rank} could not join ranks {list(ranks)[:16]} over {backend} within "
                f"{self.timeout_s:g} s: {str(error).splitlines()[0]}. Let all of them come here together; for a slice "
                f"of a mesh, they must also be in equally many process groups."
            ) from error
        return group

    def _use_default_group(self, control: Transport | None) -> None:
        """Start torch's default process group, or use the one that an earlier world started; leave others alone."""
        global _users_of_default_group
        if not dist.is_initialized():
            start_torch(self.rank_info, control=control, timeout_s=self.timeout_s)
            _users_of_default_group = 0
        elif _users_of_default_group == 0:
            return
        _users_of_default_group += 1
        self.closers.callback(_release_default_group)

    def _own(self, groups: Sequence[Sequence[int]]) -> int:
        return next(number for number, ranks in enumerate(groups) if self.rank_info.rank in ranks)


def _release_default_group() -> None:
    global _users_of_default_group
    _users_of_default_group -= 1
    if _users_of_default_group == 0 and dist.is_initialized():
        dist.destroy_process_group()
