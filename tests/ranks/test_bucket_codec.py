"""Compressors that are no pipeline: PowerSGD, which needs two sums, and a codec that needs one gather."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING

import pytest
import torch

import flexcomm
from flexcomm.errors import ConfigMismatchError, NonFiniteError
from flexcomm.sync.algorithms import Collective, digest_bits
from tests.ranks.laws import keep
from tests.ranks.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm import TensorSpec, World
    from flexcomm.kernels import Average, StateUpdate
    from flexcomm.sync.algorithms import Steps
    from flexcomm.sync.bucket import BucketContext

SHAPES = ((12, 20), (7,), (3, 4, 5), ())
NAMES = [f"t{number}" for number in range(len(SHAPES))]


# --- PowerSGD: P = M Q is summed, orthogonalised, then Q = M' P is; the mean is P Q' ----------------------------------


@dataclass(frozen=True)
class PowerSgd(flexcomm.BucketCompressor):
    rank: int

    def bucket_codec(self, specs: tuple[TensorSpec, ...]) -> PowerSgdCodec:
        return PowerSgdCodec(specs, self.rank)


def sides(spec: TensorSpec) -> tuple[int, int]:
    numel = torch.Size(spec.shape).numel()
    rows = spec.shape[0] if len(spec.shape) > 1 else 1
    return rows, numel // rows


@dataclass(frozen=True)
class PowerSgdCodec(flexcomm.BucketCodec):
    specs: tuple[TensorSpec, ...]
    most: int

    @property
    def nbytes(self) -> int:
        return 4 * sum(rows * self.rank_of(spec) for spec in self.specs for rows in sides(spec))

    @property
    def digest(self) -> int:
        return zlib.crc32(repr((self.specs, self.most)).encode())

    def rank_of(self, spec: TensorSpec) -> int:
        return min(self.most, *sides(spec))

    def state_numel(self, spec: TensorSpec) -> int:
        """What was not sent, and the Q of the step before."""
        rows, cols = sides(spec)
        return rows * cols + cols * self.rank_of(spec)

    def encode_(self, *_: object, **__: object) -> None:
        raise AssertionError("PowerSGD has an exchange of its own")

    def decode_(self, *_: object, **__: object) -> None:
        raise AssertionError("PowerSGD has an exchange of its own")

    def exchange(self, ctx: BucketContext, shard: list[Tensor]) -> Steps[Averages]:
        matrices, factors = [], []
        for number, (spec, x) in enumerate(zip(self.specs, shard, strict=True)):
            rows, cols = sides(spec)
            matrix = ctx.update.gain * x.reshape(rows, cols).float()
            factor = torch.randn(cols, self.rank_of(spec), generator=torch.Generator().manual_seed(ctx.step))
            if ctx.states is not None:
                residual, before = ctx.states[number].view(-1).split([rows * cols, factor.numel()])
                matrix = matrix + ctx.update.decay * residual.view(rows, cols)
                factor = before.view_as(factor) if bool(before.any()) else factor
            matrices.append(matrix)
            factors.append(factor)
        lefts = yield from self.sum(ctx, "exchange", [m @ q for m, q in zip(matrices, factors, strict=True)])
        lefts = [torch.linalg.qr(left)[0] for left in lefts]
        rights = yield from self.sum(ctx, "second_exchange", [m.T @ p for m, p in zip(matrices, lefts, strict=True)])
        averages = [left @ right.T for left, right in zip(lefts, rights, strict=True)]
        if ctx.states_out is not None:
            for state, matrix, average, right in zip(ctx.states_out, matrices, averages, rights, strict=True):
                state.view(-1).copy_(torch.cat(((matrix - average).reshape(-1), right.reshape(-1))))
        return Averages(averages)

    def sum(self, ctx: BucketContext, leg: str, parts: list[Tensor]) -> Steps[list[Tensor]]:
        """Average matrices over nodes, with the digest of what all must have in common."""
        buffer = torch.cat([digest_bits(ctx), *(part.reshape(-1) for part in parts)])
        moved = 2 * buffer.nbytes * (ctx.plan.nodes - 1) // ctx.plan.nodes
        ctx.record.payload_bytes += buffer.nbytes
        yield Collective(leg, methodcaller("all_reduce", buffer), moved, moved)  # type: ignore[arg-type]
        if not torch.equal(buffer[:64], digest_bits(ctx) * ctx.plan.nodes):
            raise ConfigMismatchError("nodes disagree on step, tensors or rank.")
        means = (buffer[64:] / ctx.plan.nodes).split([part.numel() for part in parts])
        return [mean.view_as(part) for mean, part in zip(means, parts, strict=True)]


@dataclass(frozen=True)
class Averages:
    averages: list[Tensor]

    def check(self, ctx: BucketContext) -> list[int]:
        del ctx
        return [not all(bool(x.isfinite().all()) for x in self.averages)]

    def explain(self, ctx: BucketContext, words: list[int]) -> list[str]:
        return [ctx.senders[ctx.plan.node]] if words[0] else []

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        del ctx
        for out, average in zip(outputs, self.averages, strict=True):
            out.copy_(average.view(out.shape))


# --- a codec that needs one gather: float16, as it is -----------------------------------------------------------------


@dataclass(frozen=True)
class Halves(flexcomm.BucketCompressor):
    def bucket_codec(self, specs: tuple[TensorSpec, ...]) -> HalvesCodec:
        return HalvesCodec(specs)


@dataclass(frozen=True)
class HalvesCodec(flexcomm.BucketCodec):
    specs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return 2 * sum(torch.Size(spec.shape).numel() for spec in self.specs)

    @property
    def digest(self) -> int:
        return zlib.crc32(repr(self.specs).encode())

    def state_numel(self, spec: TensorSpec) -> int:
        return torch.Size(spec.shape).numel()

    def encode_(
        self,
        tensors: Sequence[Tensor],
        states: Sequence[Tensor] | None,
        states_out: Sequence[Tensor] | None,
        update: StateUpdate,
        buffer: Tensor,
        *,
        step: int,
    ) -> None:
        del step
        halves, begin = buffer.view(torch.float16), 0
        for number, x in enumerate(tensors):
            whole = update.gain * x.reshape(-1).float()
            if states is not None:
                whole = whole + update.decay * states[number].view(-1)
            sent = halves[begin : begin + x.numel()].copy_(whole)
            if states_out is not None:
                states_out[number].view(-1).copy_(whole - sent.float())
            begin += x.numel()

    def decode_(self, gathered: Tensor, outputs: Sequence[Tensor], *, step: int, average: Average) -> None:
        del step, average
        begin = 0
        for out in outputs:
            parts = [row.view(torch.float16)[begin : begin + out.numel()].float() for row in gathered]
            out.copy_((sum(parts[1:], parts[0]) / len(parts)).view(out.shape))
            begin += out.numel()


# --- laws -------------------------------------------------------------------------------------------------------------


def tensors_of(rank: int, step: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def mean_of(world: World, step: int = 0) -> list[Tensor]:
    every = [tensors_of(rank, step) for rank in range(world.topology.size)]
    return [torch.stack(list(row)).mean(dim=0) for row in zip(*every, strict=True)]


def replicas_hold_the_same_bits(world: World, compressor: flexcomm.BucketCompressor) -> None:
    residuals = flexcomm.Residuals()
    for step in range(3):
        xs = tensors_of(world.topology.rank, step)
        outs = flexcomm.hierarchical_sync(
            xs, compressor, world=world, residuals=residuals, names=NAMES, step=step, bucket_bytes=700
        )
        flat = torch.cat([out.reshape(-1) for out in outs])
        everybody = world.control.all_gather(flat).wait()
        assert all(torch.equal(one, flat) for one in everybody)


def enough_rank_gives_the_mean(world: World) -> None:
    outs = flexcomm.hierarchical_sync(tensors_of(world.topology.rank), PowerSgd(20), world=world, names=NAMES)
    for out, mean in zip(outs, mean_of(world), strict=True):
        # Rounding of two products and of a QR in float32.
        torch.testing.assert_close(out, mean, rtol=1e-4, atol=1e-5)


def nothing_is_lost_only_late(world: World) -> None:
    """What was sent in all, and what is left, is what was put in: to rounding."""
    residuals, total = flexcomm.Residuals(), [torch.zeros(shape) for shape in SHAPES]
    steps = 4
    for step in range(steps):
        xs = tensors_of(world.topology.rank, step)
        outs = flexcomm.hierarchical_sync(xs, PowerSgd(2), world=world, residuals=residuals, names=NAMES, step=step)
        total = [before + out for before, out in zip(total, outs, strict=True)]
    means = [mean_of(world, step) for step in range(steps)]
    held = {name: state[0] for name, state in residuals.state_dict().items()}
    for number, name in enumerate(NAMES):
        numel, left = total[number].numel(), torch.zeros(SHAPES[number])
        if name in held:
            left = held[name][:numel].view(SHAPES[number])
        lefts = world.control.all_gather(left.contiguous()).wait().sum(dim=0) / world.topology.nodes
        expected = torch.stack([row[number] for row in means]).sum(dim=0)
        torch.testing.assert_close(total[number] + lefts, expected, rtol=1e-4, atol=1e-4)


def a_gather_is_rounded_to_halves(world: World) -> None:
    xs = [torch.full(shape, float(world.topology.node)) for shape in SHAPES]
    outs = flexcomm.hierarchical_sync(xs, Halves(), world=world, names=NAMES)
    # Small whole numbers: exact.
    for shape, out in zip(SHAPES, outs, strict=True):
        assert torch.equal(out, torch.full(shape, (world.topology.nodes - 1) / 2))


def nan_is_named_and_residuals_stay(world: World) -> None:
    residuals = flexcomm.Residuals()
    flexcomm.hierarchical_sync(
        tensors_of(world.topology.rank), Halves(), world=world, residuals=residuals, names=NAMES, step=0
    )
    before = {name: state.clone() for name, state in residuals.state_dict().items()}
    xs = tensors_of(world.topology.rank, 1)
    if world.topology.node == 1:
        xs[0].fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="had NaN"):
        flexcomm.hierarchical_sync(xs, Halves(), world=world, residuals=residuals, names=NAMES, step=1)
    assert all(torch.equal(before[name], state) for name, state in residuals.state_dict().items())


def ranks_at_different_steps_are_told(world: World) -> None:
    for compressor in (Halves(), PowerSgd(2)):
        with pytest.raises(ConfigMismatchError):
            flexcomm.hierarchical_sync(
                tensors_of(0), compressor, world=world, names=NAMES, step=int(world.topology.node == 1)
            )


SHAPES_OF_WORLDS = [Shape(2, 2), Shape(3, 1)]


@pytest.mark.parametrize("shape", SHAPES_OF_WORLDS, ids=str)
@pytest.mark.parametrize("compressor", [PowerSgd(1), PowerSgd(3), Halves()], ids=str)
def test_replicas_hold_the_same_bits(compressor: flexcomm.BucketCompressor, shape: Shape) -> None:
    keep(partial(replicas_hold_the_same_bits, compressor=compressor), shape)


@pytest.mark.parametrize("shape", SHAPES_OF_WORLDS, ids=str)
@pytest.mark.parametrize(
    "law",
    [
        enough_rank_gives_the_mean,
        nothing_is_lost_only_late,
        a_gather_is_rounded_to_halves,
        nan_is_named_and_residuals_stay,
        ranks_at_different_steps_are_told,
    ],
    ids=lambda law: law.__name__,
)
def test_a_codec_of_ones_own_keeps_the_law(law: object, shape: Shape) -> None:
    keep(law, shape)  # type: ignore[arg-type]


def test_what_needs_a_plan_says_that_there_is_none() -> None:
    with pytest.raises(flexcomm.errors.CompressorError, match=r"PowerSgd\(rank=2\) has a codec for whole buckets"):
        PowerSgd(2).plan(flexcomm.TensorSpec("x", (4, 4), torch.float32))


def test_algorithms_are_for_pipelines() -> None:
    with flexcomm.connect() as world, pytest.raises(flexcomm.errors.InvalidArgumentError, match="use auto"):
        flexcomm.hierarchical_sync(torch.ones(4, 4), PowerSgd(2), world=world, algorithm="gather")
