"""Properties of a running world that several benchmarks use: topology, wire bytes, equality of replicas."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from flexcomm import Topology, Transport, World
from flexcomm.transport import TorchTransport


def describe_world(world: World) -> str:
    """Return the topology and the transports, in a line."""
    topology = world.topology
    return (
        f"{topology.nodes} nodes x {topology.local_size} ranks ({topology.launcher}); "
        f"inside a node {world.intra.name}, between nodes {world.inter.name}, all-reduce {world.control.name}"
    )


def all_ranks_transport(world: World) -> Transport:
    """Return a transport over all ranks, by the same backend as the one between nodes."""
    if world.device.type == "cuda":
        group = torch.distributed.group.WORLD
        assert group is not None, "connect() starts torch's default group"  # noqa: S101  (our own invariant)
        return TorchTransport(group, "nccl", world.control.timeout_s)
    return world.control


def crossing_nbytes(nbytes: float, topology: Topology) -> float:
    """Return the bytes a rank sends to other nodes, on average, in an all-reduce of ``nbytes`` over all ranks.

    The lower bound: a ring of ranks in order, in which one rank of a node sends to the next node.
    """
    return 2 * (topology.size - 1) / topology.size * nbytes / topology.local_size if topology.nodes > 1 else 0.0


def hold_same_bits(tensors: Sequence[Tensor], world: World) -> bool:
    """Return whether ``tensors`` are bit-equal on all ranks. Only digests are sent."""
    digest = hashlib.blake2b(digest_size=8)
    for x in tensors:
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digests = world.control.all_gather(torch.tensor(list(digest.digest()), dtype=torch.uint8)).wait()
    return bool((digests == digests[0]).all())
