"""The rendezvous of torch's default process group: the address of rank 0, from whatever the launcher offers.

Under an MPI, rank 0 opens a store on a free port and MPI carries its addresses to the others, so nobody sets
``MASTER_ADDR``. Elsewhere ``MASTER_ADDR`` and ``MASTER_PORT`` count; under Slurm they follow from the job, if not set.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, but not exported
from torch.distributed.rendezvous import rendezvous

from flexcomm.device import backends_of_default_group
from flexcomm.errors import TransportUnavailableError
from flexcomm.topology import RankInfo
from flexcomm.transport import Transport

RECORD_BYTES = 4096
MOST_ADDRESSES = 16
PROBE_TIMEOUT_S = 2.0
SIOCGIFADDR = 0x8915
FIRST_PORT, PORTS = 20000, 20000

_worlds = count()

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendezvous:
    """An address of rank 0, and the store that is open there already, if this rank opened it."""

    address: str
    port: int
    store: TCPStore | None = None


def start_torch(rank_info: RankInfo, *, control: Transport | None, timeout_s: float) -> None:
    """Start torch's default process group over all ranks; ``control`` joins them already where there is an MPI."""
    place = find_rendezvous(rank_info, control, os.environ)
    backend = backends_of_default_group()
    timeout = timedelta(seconds=timeout_s)
    host = f"[{place.address}]" if ":" in place.address else place.address
    url = f"tcp://{host}:{place.port}"
    try:
        # torch's own rendezvous, not a plain TCPStore: it knows when torchrun's agent has opened the store already.
        store = place.store or next(rendezvous(url, rank_info.rank, rank_info.size, timeout=timeout))[0]
        # A store outlives a group, torchrun's even this process; what an earlier world left in it must not be found.
        store = PrefixStore(f"flexcomm/{next(_worlds)}", store)
        dist.init_process_group(backend, store=store, rank=rank_info.rank, world_size=rank_info.size, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise TransportUnavailableError(
            f"rank {rank_info.rank} of {rank_info.size} could not meet the others at {url} "
            f"within {timeout_s:g} s: {str(error).splitlines()[0]}. Check that every rank was started, and that this "
            f"address is reachable from every node (MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME)."
        ) from error


def find_rendezvous(rank_info: RankInfo, control: Transport | None, environ: Mapping[str, str]) -> Rendezvous:
    if control is not None:
        return exchange_address(control, environ)
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return Rendezvous(environ["MASTER_ADDR"], port_from(environ))
    if "SLURM_STEP_NODELIST" in environ:
        return rendezvous_from_slurm(environ)
    raise TransportUnavailableError(
        f"{rank_info.launcher} started {rank_info.size} ranks, but nothing tells them where to meet. Install mpi4py "
        f"(the extra [mpi]) under mpirun, or set MASTER_ADDR and MASTER_PORT to a place on rank 0's node."
    )


def port_from(environ: Mapping[str, str]) -> int:
    text = environ["MASTER_PORT"]
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise TransportUnavailableError(f"MASTER_PORT={text!r} is not a port: set a number from 1 to 65535.")
    return int(text)


def rendezvous_from_slurm(environ: Mapping[str, str]) -> Rendezvous:
    """Return the step's first node, and a port that differs between jobs and steps that share it."""
    job, step = (int(re.sub(r"\D", "", environ.get(name, "")) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Rendezvous(first_host(environ["SLURM_STEP_NODELIST"]), FIRST_PORT + (job * 31 + step) % PORTS)


def first_host(nodelist: str) -> str:
    """``"gpu[007-009,12],login1"`` becomes ``"gpu007"``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodelist)
    if match is None:
        raise TransportUnavailableError(
            f"SLURM_STEP_NODELIST={nodelist!r} names no host. Set MASTER_ADDR and MASTER_PORT."
        )
    return match.group(1) + (match.group(2) or "")


@dataclass(frozen=True)
class Offer:
    """The message of rank 0: its host, its addresses, and a port at one of them, open already or not."""

    host: str
    port: int
    addresses: list[str]
    is_open: bool

    def encoded(self) -> Tensor:
        text = bytearray(json.dumps(asdict(self)).encode())
        record = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        record[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
        return record

    @staticmethod
    def decoded(record: Tensor) -> Offer:
        fields = json.loads(bytes(record.tolist()).rstrip(b"\0"))
        addresses = [str(address) for address in fields["addresses"]]
        return Offer(str(fields["host"]), int(fields["port"]), addresses, bool(fields["is_open"]))


def exchange_address(control: Transport, environ: Mapping[str, str]) -> Rendezvous:
    """Return where rank 0 says: the address in its environment, or a store that it opens on a free port."""
    store, record = None, torch.zeros(RECORD_BYTES, dtype=torch.uint8)
    if control.rank == 0:
        store, offer = make_offer(environ)
        record = offer.encoded()
    offer = Offer.decoded(control.broadcast(record).wait())
    if not offer.is_open:
        return Rendezvous(offer.addresses[0], offer.port)
    return Rendezvous(choose_address(offer, control), offer.port, store)


def make_offer(environ: Mapping[str, str]) -> tuple[TCPStore | None, Offer]:
    """Return the store of rank 0, unless its environment names another, and its addresses, loopback first.

    Loopback is all that ranks of one host need.
    """
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return None, Offer(socket.gethostname(), port_from(environ), [environ["MASTER_ADDR"]], is_open=False)
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # noqa: S104
    others = [address for _, address in own_interfaces() if not address.startswith("127.")]
    return store, Offer(socket.gethostname(), store.port, ["127.0.0.1", *others[:MOST_ADDRESSES]], is_open=True)


def choose_address(offer: Offer, control: Transport) -> str:
    """Return the first address that every rank reaches; point gloo at the interface that leads there."""
    same_host = offer.host == socket.gethostname()
    interfaces = [own_interface_towards(address, offer.port, same_host=same_host) for address in offer.addresses]
    reached = torch.tensor([name is not None for name in interfaces], dtype=torch.uint8)
    by_all = control.all_gather(reached).wait().all(dim=0).tolist()
    if not any(by_all):
        mine = [address for address, name in zip(offer.addresses, interfaces, strict=True) if name is not None]
        raise TransportUnavailableError(
            f"no address of rank 0 ({', '.join(offer.addresses)}; port {offer.port}) is reachable from all; "
            f"rank {control.rank} reaches {mine or 'none'}. Open the port range in the firewall, or set MASTER_ADDR "
            f"and MASTER_PORT on rank 0."
        )
    chosen = by_all.index(True)
    use_interface(interfaces[chosen])
    return offer.addresses[chosen]


def own_interfaces() -> list[tuple[str, str]]:
    """Return name and IPv4 address of every interface that has one; that of ``GLOO_SOCKET_IFNAME`` first."""
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
    """Return the interface of this host that leads to ``address``; empty if unknown, ``None`` if there is none."""
    if address.startswith("127.") and not same_host:
        return None
    try:
        with socket.create_connection((address, port), timeout=PROBE_TIMEOUT_S) as connection:
            own_address = connection.getsockname()[0]
    except OSError:
        return None
    return next((name for name, candidate in own_interfaces() if candidate == own_address), "")


def use_interface(name: str | None) -> None:
    """Set gloo's interface: gloo would look up the host's name, which is often 127.0.1.1."""
    if name and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = name
        log.info("gloo uses the interface %s, which leads to rank 0", name)
