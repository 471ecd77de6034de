"""What ranks pass when synchronisation is tested, and what must come of it.

Inputs follow from rank and step, so every rank knows what all of them pass, and computes for itself what it must get.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from flexcomm.codec import plan_tensor
from flexcomm.compress import TensorSpec
from flexcomm.kernels import ValueCode
from flexcomm.kernels.reference.transform import restore
from flexcomm.sync import shard_tensor
from flexcomm.sync.plan import BucketPlan, SyncSettings, plan_buckets
from flexcomm.testing.cases import numbers, with_gaps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from flexcomm.compress import Compressor
    from flexcomm.sync import Residuals
    from flexcomm.world import World

__all__ = [
    "NAMES",
    "SPECS",
    "STEPS",
    "SUMMED",
    "algorithms_of",
    "buckets_of",
    "digest_of",
    "kept_of",
    "make",
    "mean_norm",
    "means",
    "require",
    "require_close",
    "require_equal",
    "require_same_everywhere",
    "require_states",
    "rounding",
    "tensors",
    "written_exactly_to",
]

SPECS = (
    TensorSpec("matrix", (300, 200), torch.float32),
    TensorSpec("prime", (1009,), torch.float32),
    TensorSpec("number", (), torch.float32),
    TensorSpec("nothing", (0,), torch.float32),
    TensorSpec("gaps", (40, 33), torch.float32),
    TensorSpec("brain", (65, 130), torch.bfloat16),
    TensorSpec("half", (77,), torch.float16),
    TensorSpec("double", (3, 5, 9), torch.float64),
)
NAMES = [spec.name for spec in SPECS]
STEPS = 3
SUMMED = ("reduce", "dense")
"""Ways on which values are added under way, in the type they are written in."""

_TRANSFORM = 2.0**-20
"""What a transform there and back in float32 rounds, of a tensor's norm."""


def make(spec: TensorSpec, rank: int, step: int, device: torch.device) -> Tensor:
    """Return what a rank passes; the tensor called gaps does not lie in one piece in memory."""
    seed = int.from_bytes(hashlib.blake2b(f"{spec.name} {rank} {step}".encode(), digest_size=4).digest(), "little")
    x = numbers("normal", spec.shape, seed).to(spec.dtype)
    return (with_gaps(x) if spec.name == "gaps" else x).to(device)


def tensors(world: World, step: int) -> list[Tensor]:
    return [make(spec, world.topology.rank, step, world.device) for spec in SPECS]


@lru_cache(maxsize=64)
def _rows(spec: TensorSpec, ranks: int, step: int) -> Tensor:
    """Return what all ranks pass, ``[ranks, *shape]``, as float64."""
    return torch.stack([make(spec, rank, step, torch.device("cpu")).double() for rank in range(ranks)])


def means(world: World, step: int) -> list[Tensor]:
    """Return the true means over all ranks, as float64."""
    return [_rows(spec, world.topology.size, step).sum(dim=0) / world.topology.size for spec in SPECS]


def mean_norm(world: World, spec: TensorSpec, steps: int) -> float:
    """Return the norm of what a rank passes, on average; all steps together."""
    ranks = world.topology.size
    return sum(float(_rows(spec, ranks, step).view(ranks, -1).norm(dim=1).mean()) for step in range(steps))


def buckets_of(world: World, compressor: Compressor, bucket_bytes: int) -> tuple[BucketPlan, ...]:
    """Return the way of each bucket of a call with the tensors of this module."""
    request = SyncSettings(SPECS, compressor, "nodes", "auto", "raise", bucket_bytes, has_residuals=True)
    return plan_buckets(request, world.inter.size, world.intra.size)


def algorithms_of(world: World, compressor: Compressor, bucket_bytes: int) -> dict[str, str]:
    """Return the way of each tensor, by its name."""
    buckets = buckets_of(world, compressor, bucket_bytes)
    return {NAMES[number]: bucket.algorithm for bucket in buckets for number in bucket.tensors}


def rounding(world: World, spec: TensorSpec, compressor: Compressor, way: str) -> float:
    """Return what a synchronisation may round, of the norm of what ranks pass.

    The output's dtype rounds once, or twice where sums are divided after; transforms are done in float32. Values that
    are added under way are rounded once a node, in the type they are written in.
    """
    once = _TRANSFORM + 2 * torch.finfo(spec.dtype).eps
    if way not in SUMMED:
        return once
    plan = plan_tensor(spec, compressor)
    written = (ValueCode.of(spec.dtype) if way == "dense" else plan.values).format
    if written.rounding is None:
        raise AssertionError(f"{plan.values!r} is not added under way, but {way} adds {spec.name}")
    return once + world.inter.size * written.rounding


def written_exactly_to(spec: TensorSpec, compressor: Compressor) -> float | None:
    """Return how exactly a compressor that leaves nothing out writes values; None if it leaves out, or writes signs."""
    plan = plan_tensor(spec, compressor)
    most = plan.values.format.rounding
    # In norm: of many values, few are rounded by the most that one can be.
    return most / 2 if plan.sends_everything and most is not None else None


def kept_of(world: World, residuals: Residuals, spec: TensorSpec, compressor: Compressor) -> Tensor:
    """Return what residuals keep of a tensor, brought back to elements, as the mean over nodes."""
    late = torch.zeros(spec.shape).double()
    piece = shard_tensor(spec, plan_tensor(spec, compressor), world.intra.size)[world.intra.rank]
    if piece is not None:
        late.view(-1)[piece.first : piece.last] = restore(residuals[piece.spec.name].cpu(), piece.plan).reshape(-1)
    return world.control.all_reduce(late).wait() / world.inter.size


def digest_of(xs: Sequence[Tensor]) -> Tensor:
    """Return 16 bytes that differ if a bit of the tensors does."""
    mixed = hashlib.blake2b(digest_size=16)
    for x in xs:
        mixed.update(_bits_of(x).numpy().tobytes())
    return torch.frombuffer(bytearray(mixed.digest()), dtype=torch.uint8)


def _bits_of(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8)


def require(world: World, condition: bool, law: str) -> None:
    if not condition:
        raise AssertionError(f"{world.topology}: broken law: {law}")


def require_equal(world: World, got: Tensor, expected: Tensor, law: str) -> None:
    """Raise unless both are equal in every bit: zeros have signs here."""
    alike = got.dtype == expected.dtype and got.shape == expected.shape
    require(world, alike and torch.equal(_bits_of(got), _bits_of(expected)), f"{law}\ngot      {got}\nnot {expected}")


def require_close(world: World, got: Tensor, expected: Tensor, allowed: float, law: str) -> None:
    distance = float((got.cpu().double() - expected.cpu().double()).norm())
    require(world, distance <= allowed, f"{law}, to {allowed:.3g}, but they are {distance:.3g} apart")


def require_same_everywhere(world: World, xs: Sequence[Tensor], law: str) -> None:
    everybodys = world.control.all_gather(digest_of(xs)).wait()
    odd = [rank for rank, other in enumerate(everybodys) if not torch.equal(other, everybodys[0])]
    require(world, not odd, f"{law}, but not ranks {odd}")


def require_states(world: World, residuals: Residuals, expected: Mapping[str, Tensor], law: str) -> None:
    """Raise unless the states are these, to the bit."""
    require(world, residuals.names() == list(expected), f"{law}: {residuals.names()} are {list(expected)}")
    for name, state in residuals.state_dict().items():
        require_equal(world, state, expected[name], f"{law}: {name}")
