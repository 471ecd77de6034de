"""How ranks meet: torch's process groups are started from whatever the launcher offers.

Under an MPI, rank 0 opens a store on a free port and MPI carries its addresses to the others, so nobody sets
``MASTER_ADDR``. Elsewhere the usual variables count, and under Slurm what they would be follows from the job.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, but not exported
from torch.distributed.rendezvous import rendezvous

from flexcomm.errors import TopologyError, TransportUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flexcomm.topology import Announcement
    from flexcomm.transport import Transport

__all__ = ["check_torch_place", "start_torch"]

RECORD_BYTES = 4096
PROBE_TIMEOUT_S = 2.0
SIOCGIFADDR = 0x8915
FIRST_PORT, PORTS = 20000, 20000

_worlds = count()

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet, and the store that is open there already, if this rank opened it."""

    address: str
    port: int
    store: TCPStore | None = None


def check_torch_place(announced: Announcement) -> None:
    """Raise unless torch, started by somebody else, and the launcher give this process the same place."""
    place = (dist.get_rank(), dist.get_world_size())
    if place != (announced.rank, announced.size):
        raise TopologyError(
            f"torch.distributed is started with rank {place[0]} of {place[1]}, but {announced.launcher} announced rank "
            f"{announced.rank} of {announced.size}. Start torch.distributed with the launcher's numbers, or let "
            f"flexcomm.connect() start it."
        )


def start_torch(announced: Announcement, *, control: Transport | None, timeout_s: float) -> None:
    """Start torch's default process group over all ranks; ``control`` joins them already where there is an MPI."""
    meeting = find_meeting(announced, control, os.environ)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    url = f"tcp://{meeting.address}:{meeting.port}"
    try:
        # torch's own rendezvous, not a plain TCPStore: it knows when torchrun's agent has opened the store already.
        store = meeting.store or next(rendezvous(url, announced.rank, announced.size, timeout=timeout))[0]
        # A store outlives a group, torchrun's even this process; what an earlier world left in it must not be found.
        store = PrefixStore(f"flexcomm/{next(_worlds)}", store)
        dist.init_process_group(backend, store=store, rank=announced.rank, world_size=announced.size, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        raise TransportUnavailableError(
            f"rank {announced.rank} of {announced.size} could not meet the others at {url} "
            f"within {timeout_s:g} s: {str(error).splitlines()[0]}. Check that every rank was started, and that this "
            f"address is reachable from every node (MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME)."
        ) from error


def find_meeting(announced: Announcement, control: Transport | None, environ: Mapping[str, str]) -> Meeting:
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return Meeting(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    if control is not None:
        return meet_over(control)
    if "SLURM_STEP_NODELIST" in environ:
        return meeting_from_slurm(environ)
    raise TransportUnavailableError(
        f"{announced.launcher} started {announced.size} ranks, but nothing tells them where to meet. Install mpi4py "
        f"(pip install 'flexcomm[mpi]') under mpirun, or set MASTER_ADDR and MASTER_PORT to a place on rank 0's node."
    )


def meeting_from_slurm(environ: Mapping[str, str]) -> Meeting:
    """The step's first node, and a port that differs between jobs and steps that share it."""
    job, step = (int(re.sub(r"\D", "", environ.get(name, "")) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Meeting(first_host(environ["SLURM_STEP_NODELIST"]), FIRST_PORT + (job * 31 + step) % PORTS)


def first_host(nodelist: str) -> str:
    """``"gpu[007-009,12],login1"`` becomes ``"gpu007"``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodelist)
    if match is None:
        raise TransportUnavailableError(
            f"SLURM_STEP_NODELIST={nodelist!r} names no host. Set MASTER_ADDR and MASTER_PORT."
        )
    return match.group(1) + (match.group(2) or "")


def meet_over(control: Transport) -> Meeting:
    """Rank 0 opens a store; all ranks settle on the first of its addresses that every one of them reaches."""
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False) if control.rank == 0 else None  # noqa: S104
    record = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
    if store is not None:
        text = bytearray(encode_offer(store.port))
        record[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
    offer = json.loads(bytes(control.broadcast(record).wait().tolist()).rstrip(b"\0"))
    port, addresses = int(offer["port"]), [str(address) for address in offer["addresses"]]
    same_host = offer["host"] == socket.gethostname()
    ways = [own_interface_towards(address, port, same_host=same_host) for address in addresses]
    reached = torch.tensor([way is not None for way in ways], dtype=torch.uint8)
    by_all = control.all_gather(reached).wait().all(dim=0).tolist()
    if not any(by_all):
        raise TransportUnavailableError(
            f"no address of rank 0 ({', '.join(addresses)}; port {port}) is reachable from every rank; from rank "
            f"{control.rank}: {[address for address, way in zip(addresses, ways, strict=True) if way]}. Open the port "
            f"range in the firewall, or set MASTER_ADDR and MASTER_PORT."
        )
    chosen = by_all.index(True)
    use_interface(ways[chosen])
    return Meeting(addresses[chosen], port, store)


def encode_offer(port: int) -> bytes:
    """Rank 0's host, port and addresses; loopback first, which is all that ranks of one host need."""
    others = [address for _, address in own_interfaces() if not address.startswith("127.")]
    offer = {"host": socket.gethostname(), "port": port, "addresses": ["127.0.0.1", *others[:64]]}
    return json.dumps(offer).encode()


def own_interfaces() -> list[tuple[str, str]]:
    """Name and IPv4 address of every interface that has one; that of ``GLOO_SOCKET_IFNAME`` first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    preferred = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return sorted(found, key=lambda pair: pair[0] not in preferred)


def own_interface_towards(address: str, port: int, *, same_host: bool) -> str | None:
    """The interface of this host that leads to ``address``; ``None`` if rank 0 does not answer there."""
    if address.startswith("127.") and not same_host:
        return None
    try:
        with socket.create_connection((address, port), timeout=PROBE_TIMEOUT_S) as connection:
            own_address = connection.getsockname()[0]
    except OSError:
        return None
    return next((name for name, candidate in own_interfaces() if candidate == own_address), "lo")


def use_interface(name: str | None) -> None:
    """Gloo looks up the host's name to find its own address, and hosts often name themselves 127.0.1.1."""
    if name and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = name
        log.info("gloo uses the interface %s, which leads to rank 0", name)
