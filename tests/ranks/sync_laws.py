"""The laws of synchronisation, held by any world and any compressor.

All ranks of the world call a check together. A broken law raises ``AssertionError`` naming it and the rank; the other
ranks may then wait for that one, until their deadline. Inputs follow from rank and step, so that every rank knows what
all of them pass, and computes for itself what it must get.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from flexcomm.codec import plan_tensor, shard_tensor
from flexcomm.compress import Compressor, TensorSpec, demo, dense, striding, top_k
from flexcomm.errors import (
    ConfigMismatchError,
    FlexcommError,
    InvalidArgumentError,
    InvalidTensorError,
    NonFiniteError,
)
from flexcomm.kernels import Average, ValueCode
from flexcomm.kernels.reference.transform import restore
from flexcomm.sync.api import BUCKET_BYTES, hierarchical_sync, start_exchange, start_sync
from flexcomm.sync.plan import AlgorithmOption, BucketPlan, NonFinitePolicy, SyncSettings, plan_buckets
from flexcomm.sync.residuals import Residuals
from flexcomm.testing.cases import numbers, with_gaps
from flexcomm.world import World

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
"""Algorithms in which values are added by the collective, in the type they are written in."""
_ONE_COLLECTIVE = ("gather", "reduce", "dense")
_TRANSFORM = 2.0**-20
"""The rounding of a transform there and back in float32, relative to a tensor's norm."""


def check_sync(world: World, compressor: Compressor) -> None:
    """Raise ``AssertionError`` unless synchronising by ``compressor`` keeps every law in this world.

    All ranks call it together.
    """
    for law in SYNC_LAWS:
        law(world, compressor)
    for call_law in CALL_LAWS:
        call_law(world)


def replicas_hold_the_same_bits(world: World, compressor: Compressor) -> None:
    residuals = Residuals()
    for step in range(STEPS):
        outs = sync_step(world, compressor, step, residuals=residuals)
        require_same_everywhere(world, outs, f"all ranks hold the same bits after step {step}")
        for spec, out in zip(SPECS, outs, strict=True):
            require(world, (out.dtype, tuple(out.shape)) == (spec.dtype, spec.shape), f"{spec} comes back as it was")


def nothing_is_lost_only_late(world: World, compressor: Compressor) -> None:
    """The inputs of all ranks and steps are the outputs and what residuals hold, to rounding."""
    residuals, algorithms = Residuals(), algorithms_of(world, compressor, BUCKET_BYTES)
    given, came = ([torch.zeros(spec.shape).double() for spec in SPECS] for _ in range(2))
    for step in range(STEPS):
        outs = sync_step(world, compressor, step, residuals=residuals)
        for total, mean in zip(given, means(world, step), strict=True):
            total += mean
        for total, out in zip(came, outs, strict=True):
            total += out.cpu().double()
    for spec, passed, got in zip(SPECS, given, came, strict=True):
        late = residual_of(world, residuals, spec, compressor)
        allowed = rounding(world, spec, compressor, algorithms[spec.name]) * STEPS * mean_norm(world, spec, STEPS)
        require_close(world, got + late, passed, allowed, f"{spec}: nothing is lost, only late")


def everything_sent_is_the_mean(world: World, compressor: Compressor) -> None:
    """Asked of the dense algorithm, and of compressors that leave nothing out and write numbers, not signs."""
    algorithms = algorithms_of(world, compressor, BUCKET_BYTES)
    by_dense = sync_step(world, compressor, 0, algorithm="dense")
    outs = sync_step(world, compressor, 0)
    for spec, got, out, mean in zip(SPECS, by_dense, outs, means(world, 0), strict=True):
        size, written = mean_norm(world, spec, 1), value_rounding(spec, compressor)
        allowed = rounding(world, spec, compressor, "dense") * size
        require_close(world, got, mean, allowed, f"{spec}: the dense algorithm gives the mean")
        if written is not None:
            allowed = (rounding(world, spec, compressor, algorithms[spec.name]) + written) * size
            require_close(world, out, mean, allowed, f"{spec}: everything sent is the mean")


def bucketing_is_invisible(world: World, compressor: Compressor) -> None:
    """To the bit; where a collective adds more than two, to rounding, because the order is the transport's."""
    algorithms = algorithms_of(world, compressor, BUCKET_BYTES)

    def last_step(nbytes: int) -> list[Tensor]:
        residuals = Residuals()
        return [sync_step(world, compressor, i, residuals=residuals, bucket_bytes=nbytes) for i in range(STEPS)][-1]

    first, *others = (last_step(nbytes) for nbytes in (BUCKET_BYTES, 10_000, 1))
    for other in others:
        for spec, got, expected in zip(SPECS, other, first, strict=True):
            law = f"{spec}: any size of buckets gives the same"
            if algorithms[spec.name] in SUMMED and world.inter.size > 2:
                once = rounding(world, spec, compressor, algorithms[spec.name])
                require_close(world, got, expected, once * STEPS * mean_norm(world, spec, STEPS), law)
            else:
                require_equal(world, got, expected, law)


def a_bucket_takes_one_collective_between_nodes(world: World, compressor: Compressor) -> None:
    """Two, if lengths depend on the data, and for ``two_phase``."""
    for nbytes in (1, 10_000, BUCKET_BYTES):
        buckets = buckets_of(world, compressor, nbytes)
        expected = sum(1 if bucket.algorithm in _ONE_COLLECTIVE else 2 for bucket in buckets)
        xs, before = tensors(world, 0), world.stats()
        handle = start_sync(xs, compressor, world=world, names=NAMES, step=0, bucket_bytes=nbytes)
        handle.wait()
        after = world.stats()
        for name, count in (("inter_collectives", expected), ("syncs", 1), ("skipped", 0)):
            counted = after[name] - before[name]
            require(world, counted == count, f"{len(buckets)} buckets make {count} {name}, but there were {counted:g}")
        dense_bytes = world.intra.all_reduce(torch.tensor([handle.record.dense_bytes], device=world.device)).wait()
        require(world, int(dense_bytes) == sum(x.nbytes for x in xs), "the records of a node count the tensors once")


def every_algorithm_agrees(world: World, compressor: Compressor) -> None:
    """To the bit; to rounding, where the collective adds values."""
    xs, untouched = tensors(world, 0), tensors(world, 0)
    results: dict[str, list[Tensor]] = {}
    for algorithm in get_args(AlgorithmOption):
        try:
            outs = sync_step(world, compressor, 0, xs=xs, algorithm=algorithm)
        except InvalidArgumentError:
            continue
        require_same_everywhere(world, outs, f"all ranks hold the same bits by {algorithm}")
        for spec, x, made in zip(SPECS, xs, untouched, strict=True):
            require_equal(world, x, made, f"{algorithm} leaves the input {spec} as it was")
        results[algorithm] = outs
    require(world, {"auto", "dense", "gatherv"} <= set(results), "auto, dense and gatherv carry any compressor")
    for algorithm in {"gather", "two_phase", "reduce"} & set(results):
        for spec, got, expected in zip(SPECS, results[algorithm], results["gatherv"], strict=True):
            law = f"{spec}: {algorithm} gives what gatherv gives"
            if algorithm in SUMMED:
                allowed = rounding(world, spec, compressor, algorithm) * mean_norm(world, spec, 1)
                require_close(world, got, expected, allowed, law)
            else:
                require_equal(world, got, expected, law)


def handles_give_what_blocking_calls_give(world: World, compressor: Compressor) -> None:
    """Even ranks wait for the first handle first, odd ranks for the last."""
    blocking = [sync_step(world, compressor, step, residuals=Residuals()) for step in range(STEPS)]
    handles = [
        start_sync(tensors(world, step), compressor, world=world, residuals=Residuals(), names=NAMES, step=step)
        for step in range(STEPS)
    ]
    for number in range(STEPS) if world.topology.rank % 2 == 0 else reversed(range(STEPS)):
        outs = handles[number].wait()
        again = handles[number].wait()
        require(world, handles[number].done(), "a handle that was waited for is done")
        for spec, got, same, expected in zip(SPECS, outs, again, blocking[number], strict=True):
            require(world, same is got, f"{spec}: waiting again returns the same tensor")
            require_equal(world, got, expected, f"{spec}: handle {number} gives what a blocking call gives")


def averages_go_where_out_says(world: World, compressor: Compressor) -> None:
    """Twice into the same tensors, which hold something before."""
    outs = [torch.full(spec.shape, torch.nan, dtype=spec.dtype, device=world.device) for spec in SPECS]
    for step in range(2):
        xs, untouched = tensors(world, step), tensors(world, step)
        expected = sync_step(world, compressor, step, xs=xs)
        returned = start_sync(xs, compressor, world=world, names=NAMES, step=step, out=outs).wait()
        for spec, got, out, other in zip(SPECS, returned, outs, expected, strict=True):
            require(world, got is out, f"{spec}: what is returned is the very tensor passed")
            require_equal(world, out, other, f"{spec}: out holds what a new tensor would")
        for spec, x, before in zip(SPECS, xs, untouched, strict=True):
            require_equal(world, x, before, f"{spec}: inputs are not changed")


def shards_are_averaged_over_nodes(world: World, compressor: Compressor) -> None:
    """Ranks of a node hold shards of different shapes. Whole tensors can be synchronised before and after."""
    place = world.topology
    specs = (
        TensorSpec("shard", (70 + 3 * place.local_rank, 33), torch.float32),
        TensorSpec("flat", (500 * place.local_rank,), torch.bfloat16),
    )
    peers, residuals = place.inter_groups[place.local_rank], Residuals()
    shards = [make(spec, place.rank, 0, world.device) for spec in specs]
    require_works(world)
    for step in range(2):
        outs = start_exchange(shards, compressor, world=world, residuals=residuals, step=step).wait()
        digests = world.inter.all_gather(digest_of(outs).to(world.device)).wait()
        require(world, bool((digests == digests[0]).all()), "ranks of equal local rank hold the same bits")
    outs = start_exchange(shards, compressor, world=world, step=0, algorithm="dense").wait()
    for spec, out in zip(specs, outs, strict=True):
        rows = torch.stack([make(spec, rank, 0, torch.device("cpu")).double() for rank in peers])
        size = float(rows.view(len(peers), -1).norm(dim=1).mean())
        allowed = rounding(world, spec, compressor, "dense") * size
        require_close(world, out, rows.mean(dim=0), allowed, f"{spec}: shards are averaged over nodes")
    require_works(world)


def a_nan_is_everybodys_affair(world: World, compressor: Compressor) -> None:
    """One rank has a NaN: all ranks raise, skip or send zeros, and residuals change only where something was sent."""
    ill, well = tensors(world, 1), tensors(world, 1)
    if world.topology.rank == world.topology.size - 1:
        for name, value in (("matrix", torch.nan), ("brain", torch.inf), ("double", -(2.0**100))):
            ill[NAMES.index(name)].view(-1)[-1] = value
            well[NAMES.index(name)].view(-1)[-1] = 0.0
    for exact in (True, False):
        residuals, twin = Residuals(exact_rollback=exact), Residuals()

        def sync(xs: list[Tensor], nonfinite: NonFinitePolicy, used: Residuals) -> list[Tensor]:
            return sync_step(world, compressor, 1, xs=xs, nonfinite=nonfinite, residuals=used)

        sync_step(world, compressor, 0, residuals=residuals)
        before = copy_states(residuals)
        raised = error_of(partial(sync, ill, "raise", residuals))
        require(world, isinstance(raised, NonFiniteError), f"a NaN raises NonFiniteError everywhere, not {raised!r}")
        require_states(world, residuals, before, "raising leaves residuals as they were", exact=exact)
        skipped = world.stats()["skipped"]
        for spec, out in zip(SPECS, sync(ill, "skip", residuals), strict=True):
            require_equal(world, out, torch.zeros_like(out), f"{spec}: what is skipped is zero")
        require(world, world.stats()["skipped"] == skipped + 1, "what is skipped is counted")
        require_states(world, residuals, before, "skipping leaves residuals as they were", exact=exact)
        twin.load_state_dict(copy_states(residuals))
        expected = sync(well, "raise", twin)
        for spec, got, out in zip(SPECS, sync(ill, "zero", residuals), expected, strict=True):
            require_equal(world, got, out, f"{spec}: a NaN counts as zero")
        require_states(world, residuals, twin.state_dict(), "a NaN counts as zero in residuals")


def other_settings_are_found_by_all(world: World, compressor: Compressor) -> None:
    """The last rank passes another shape, dtype, name, or compressor; all are told what differs."""
    if world.topology.size == 1:
        return
    is_last = world.topology.rank == world.topology.size - 1
    x = torch.ones(70, 33, device=world.device)
    cases: dict[str, tuple[Tensor, str, Compressor]] = {
        r"tensor 0: .*70, 33.*69, 33": (x[:-1], "agreed", compressor),
        r"tensor 0: .*float32.*bfloat16": (x.bfloat16(), "agreed", compressor),
        r"tensor 0: .*agreed.*other": (x, "other", compressor),
        r"compressor: ": (x, "agreed", top_k(0.123)),
    }
    for words, theirs in cases.items():
        mine, name, chosen = theirs if is_last else (x, "agreed", compressor)
        raised = error_of(lambda: hierarchical_sync([mine], chosen, world=world, names=[name], step=0))  # noqa: B023  (called at once)
        require_mismatch(world, raised, words)
    require_works(world)


def another_step_is_found_by_all(world: World, compressor: Compressor) -> None:
    """Found by the headers, because steps are not compared beforehand; residuals stay as they were."""
    if world.topology.size == 1:
        return
    is_last = world.topology.rank == world.topology.size - 1
    # Dense sums carry no headers, and tell by other means.
    cases: tuple[tuple[AlgorithmOption, int], ...] = (("auto", 10_000), ("auto", BUCKET_BYTES), ("dense", BUCKET_BYTES))
    for (algorithm, nbytes), exact in product(cases, (True, False)):
        residuals = Residuals(exact_rollback=exact)
        sync = partial(sync_step, world, compressor, residuals=residuals, algorithm=algorithm, bucket_bytes=nbytes)
        sync(0)
        before = copy_states(residuals)
        raised = error_of(partial(sync, 2 if is_last else 1))
        require_mismatch(world, raised, "step")
        require_states(world, residuals, before, "a call that fails leaves residuals as they were", exact=exact)
        require_same_everywhere(world, sync(3), "all ranks hold the same bits after a failed call")


def sums_that_fail_are_rolled_back(world: World) -> None:
    """An all-reduce leaves nothing of what was sent."""
    another_step_is_found_by_all(world, striding(1 / 8))


def contributors_alone_can_be_averaged(world: World) -> None:
    """Every node has one number to send, in a place of its own: it is divided by one, or by the number of nodes."""
    node, nodes = world.topology.node, world.topology.nodes
    x = torch.zeros(1024, device=world.device)
    x[node] = node + 1.0
    alone = torch.zeros(1024)
    alone[:nodes] = torch.arange(nodes) + 1.0
    compressor = top_k(1 / 1024, values="fp32")
    algorithms: tuple[AlgorithmOption, ...] = ("gather", "gatherv", "two_phase")
    for algorithm in algorithms:
        averages: dict[Average, Tensor] = {"contributors": alone, "nodes": alone / nodes}
        for average, expected in averages.items():
            got = hierarchical_sync(x, compressor, world=world, step=0, algorithm=algorithm, average=average)
            require_equal(world, got.cpu(), expected, f"{average} are averaged by {algorithm}")


def calls_in_another_order_are_found_by_all(world: World) -> None:
    """Asked of calls that are new: those that were agreed before are not compared again."""
    if world.topology.size == 1:
        return
    shapes = ((31,), (37,)) if world.topology.rank == 0 else ((37,), (31,))
    for shape in shapes:
        x = torch.ones(shape, device=world.device)
        raised = error_of(lambda: hierarchical_sync(x, dense(), world=world, names=["in order"], step=0))  # noqa: B023  (called at once)
        require_mismatch(world, raised, r"tensor 0: .*31.* on .*37|tensor 0: .*37.* on .*31")
    require_works(world)


def names_are_told_apart(world: World) -> None:
    """Residuals in use are refused to a second call, and several tensors of one name to any."""
    x, residuals = torch.ones(100, device=world.device), Residuals()
    options: dict[str, Any] = {"world": world, "residuals": residuals, "step": 0}
    handle = start_sync(x, top_k(0.1), **options)
    raised = error_of(lambda: start_sync(x, top_k(0.1), **options))
    handle.wait()
    for error in (raised, error_of(lambda: hierarchical_sync([x, x], dense(), names=["a", "a"], world=world))):
        require(world, isinstance(error, InvalidArgumentError), f"names are told apart, but got {error!r}")
    hierarchical_sync(x, top_k(0.1), **options)
    require_works(world)


def residuals_that_do_not_fit_are_everybodys_affair(world: World) -> None:
    """All ranks raise, also those that hold no part of them, and the calls after that work."""
    x, residuals = torch.ones(3, 70, device=world.device), Residuals()
    options: dict[str, Any] = {"world": world, "residuals": residuals, "step": 0}
    hierarchical_sync(x, demo(k=2, chunk=64), **options)
    before = copy_states(residuals)
    raised = error_of(lambda: hierarchical_sync(x, demo(k=2, chunk=32), **options))
    # Ranks that hold no part of the residuals learn from the others.
    is_told = isinstance(raised, InvalidTensorError if before else NonFiniteError)
    require(world, is_told, f"all are told that residuals do not fit, but got {raised!r}")
    require_states(world, residuals, before, "a call that fails leaves residuals as they were")
    hierarchical_sync(x, demo(k=2, chunk=64), **options)
    require_works(world)


SYNC_LAWS: tuple[Callable[[World, Compressor], None], ...] = (
    replicas_hold_the_same_bits,
    nothing_is_lost_only_late,
    everything_sent_is_the_mean,
    bucketing_is_invisible,
    a_bucket_takes_one_collective_between_nodes,
    every_algorithm_agrees,
    handles_give_what_blocking_calls_give,
    shards_are_averaged_over_nodes,
    a_nan_is_everybodys_affair,
    other_settings_are_found_by_all,
    another_step_is_found_by_all,
    averages_go_where_out_says,
)

CALL_LAWS: tuple[Callable[[World], None], ...] = (
    sums_that_fail_are_rolled_back,
    contributors_alone_can_be_averaged,
    calls_in_another_order_are_found_by_all,
    names_are_told_apart,
    residuals_that_do_not_fit_are_everybodys_affair,
)


def error_of(call: Callable[[], object]) -> FlexcommError | None:
    try:
        call()
    except FlexcommError as error:
        return error
    return None


def require_mismatch(world: World, error: FlexcommError | None, words: str) -> None:
    told = isinstance(error, ConfigMismatchError) and re.search(words, str(error))
    require(world, bool(told), f"all are told that they disagree on {words!r}, but got {error!r}")


def require_works(world: World) -> None:
    """Raise unless the world can still synchronise."""
    x = torch.full((5,), float(world.topology.rank), device=world.device)
    out = hierarchical_sync(x, dense(), world=world, names=["still"], step=0)
    expected = torch.full((5,), (world.topology.size - 1) / 2)
    require_equal(world, out.cpu(), expected, "the world still works")


def make(spec: TensorSpec, rank: int, step: int, device: torch.device) -> Tensor:
    """Return the input of a rank; the tensor called gaps is not contiguous."""
    seed = int.from_bytes(hashlib.blake2b(f"{spec.name} {rank} {step}".encode(), digest_size=4).digest(), "little")
    x = numbers("normal", spec.shape, seed).to(spec.dtype)
    return (with_gaps(x) if spec.name == "gaps" else x).to(device)


def tensors(world: World, step: int) -> list[Tensor]:
    return [make(spec, world.topology.rank, step, world.device) for spec in SPECS]


def sync_step(
    world: World, compressor: Compressor, step: int, xs: list[Tensor] | None = None, **options: Any
) -> list[Tensor]:
    """Synchronise ``xs``, or else the inputs of this rank; ``options`` are those of ``hierarchical_sync``."""
    xs = tensors(world, step) if xs is None else xs
    return hierarchical_sync(xs, compressor, world=world, names=NAMES, step=step, **options)


def copy_states(residuals: Residuals) -> dict[str, Tensor]:
    return {name: state.clone() for name, state in residuals.state_dict().items()}


@lru_cache(maxsize=64)
def _rows(spec: TensorSpec, ranks: int, step: int) -> Tensor:
    """Return the inputs of all ranks, ``[ranks, *shape]``, as float64."""
    return torch.stack([make(spec, rank, step, torch.device("cpu")).double() for rank in range(ranks)])


def means(world: World, step: int) -> list[Tensor]:
    """Return the true means over all ranks, as float64."""
    return [_rows(spec, world.topology.size, step).sum(dim=0) / world.topology.size for spec in SPECS]


def mean_norm(world: World, spec: TensorSpec, steps: int) -> float:
    """Return the norm of a rank's input, as the mean over ranks, added over steps."""
    ranks = world.topology.size
    return sum(float(_rows(spec, ranks, step).view(ranks, -1).norm(dim=1).mean()) for step in range(steps))


def buckets_of(world: World, compressor: Compressor, bucket_bytes: int) -> tuple[BucketPlan, ...]:
    """Return the buckets of a call with the tensors of this module."""
    request = SyncSettings(SPECS, compressor, "nodes", "auto", "raise", bucket_bytes, has_residuals=True)
    return plan_buckets(request, world.inter.size, world.intra.size)


def algorithms_of(world: World, compressor: Compressor, bucket_bytes: int) -> dict[str, str]:
    """Return the algorithm of each tensor, by its name."""
    buckets = buckets_of(world, compressor, bucket_bytes)
    return {NAMES[number]: bucket.algorithm for bucket in buckets for number in bucket.tensors}


def rounding(world: World, spec: TensorSpec, compressor: Compressor, algorithm: str) -> float:
    """Return how much a synchronisation may round, relative to the norm of the inputs.

    The output's dtype rounds once, or twice where sums are divided after; transforms are done in float32. Values that
    a collective adds are rounded once a node, in the type they are written in.
    """
    once = _TRANSFORM + 2 * torch.finfo(spec.dtype).eps
    if algorithm not in SUMMED:
        return once
    plan = plan_tensor(spec, compressor)
    written = (ValueCode.of(spec.dtype) if algorithm == "dense" else plan.values).format
    if written.rounding is None:
        raise AssertionError(f"{plan.values!r} cannot be added, but {algorithm} adds {spec.name}")
    return once + world.inter.size * written.rounding


def value_rounding(spec: TensorSpec, compressor: Compressor) -> float | None:
    """Return the rounding of values by a compressor that sends all; None if it does not, or sends signs."""
    plan = plan_tensor(spec, compressor)
    most = plan.values.format.rounding
    # In norm: of many values, few are rounded by the most that one can be.
    return most / 2 if plan.sends_everything and most is not None else None


def residual_of(world: World, residuals: Residuals, spec: TensorSpec, compressor: Compressor) -> Tensor:
    """Return the residual of a tensor as elements, as the mean over nodes."""
    late = torch.zeros(spec.shape).double()
    shard = shard_tensor(spec, plan_tensor(spec, compressor), world.intra.size)[world.intra.rank]
    if shard is not None:
        late.view(-1)[shard.first : shard.last] = restore(residuals[shard.spec.name].cpu(), shard.plan).reshape(-1)
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
    digests = world.control.all_gather(digest_of(xs)).wait()
    odd = [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]
    require(world, not odd, f"{law}, but not ranks {odd}")


def require_states(
    world: World, residuals: Residuals, expected: Mapping[str, Tensor], law: str, *, exact: bool = True
) -> None:
    """Raise unless the states are these, to the bit or, where they were restored in place, to rounding."""
    require(world, residuals.names() == list(expected), f"{law}: {residuals.names()} are {list(expected)}")
    for name, state in residuals.state_dict().items():
        if exact:
            require_equal(world, state, expected[name], f"{law}: {name}")
        else:
            allowed = 2.0**-18 * (1.0 + float(expected[name].abs().max()))
            require(world, bool(((state - expected[name]).abs() <= allowed).all()), f"{law}, to rounding: {name}")
