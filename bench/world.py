"""Properties of a running world that several benchmarks use: topology, wire bytes, equality of replicas."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from flexcomm import Topology, Transport, World
from flexcomm.transport import TorchTransport


def describe_world(world: World) -> str:
    """Return the topology in a line."""
    place = world.topology
    return (
        f"{place.nodes} nodes x {place.local_size} ranks ({place.launcher}); inside a node {world.intra.name}, "
        f"between nodes {world.inter.name}, all-reduce {world.control.name}"
    )


def everybody(world: World) -> Transport:
    """Return what joins all ranks by the same kind of cable that joins nodes."""
    if world.device.type == "cuda":
        group = torch.distributed.group.WORLD
        assert group is not None, "connect() starts torch's default group"  # noqa: S101  (our own invariant)
        return TorchTransport(group, "nccl", world.control.timeout_s)
    return world.control


def crossing_nbytes(nbytes: float, place: Topology) -> float:
    """Return what a rank sends to other nodes, on average, when all ranks add up ``nbytes``.

    The least there is: a ring of ranks in order, in which one rank of a node talks to the next node.
    """
    return 2 * (place.size - 1) / place.size * nbytes / place.local_size if place.nodes > 1 else 0.0


def hold_same_bits(tensors: Sequence[Tensor], world: World) -> bool:
    """Return whether these are equal on all ranks, bit by bit. Only digests travel."""
    digest = hashlib.blake2b(digest_size=8)
    for x in tensors:
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digests = world.control.all_gather(torch.tensor(list(digest.digest()), dtype=torch.uint8)).wait()
    return bool((digests == digests[0]).all())
