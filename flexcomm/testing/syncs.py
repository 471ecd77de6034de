"""The laws of synchronisation, held by any world and any compressor.

All ranks of the world call a check together. A broken law raises ``AssertionError`` naming it and the rank; the other
ranks may then wait for that one, until their deadline.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, get_args

import torch

from flexcomm.compress import TensorSpec, demo, dense, top_k
from flexcomm.errors import (
    ConfigMismatchError,
    FlexcommError,
    InvalidArgumentError,
    InvalidTensorError,
    NonFiniteError,
)
from flexcomm.sync import BUCKET_BYTES, AlgorithmOption, Residuals, hierarchical_sync, start_exchange, start_sync
from flexcomm.testing.expected import (
    NAMES,
    SPECS,
    STEPS,
    SUMMED,
    algorithms_of,
    buckets_of,
    digest_of,
    kept_of,
    make,
    mean_norm,
    means,
    require,
    require_close,
    require_equal,
    require_same_everywhere,
    require_states,
    rounding,
    tensors,
    written_exactly_to,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flexcomm.compress import Compressor
    from flexcomm.kernels import Average
    from flexcomm.sync import NonFinitePolicy
    from flexcomm.world import World

__all__ = ["CALL_LAWS", "SYNC_LAWS", "check_sync"]

_ONE_COLLECTIVE = ("gather", "reduce", "dense")


def check_sync(world: World, compressor: Compressor) -> None:
    """Raise ``AssertionError`` unless synchronising by ``compressor`` keeps every law in this world."""
    for law in SYNC_LAWS:
        law(world, compressor)
    for call_law in CALL_LAWS:
        call_law(world)


def replicas_hold_the_same_bits(world: World, compressor: Compressor) -> None:
    residuals = Residuals()
    for step in range(STEPS):
        xs = tensors(world, step)
        outs = hierarchical_sync(xs, compressor, world=world, residuals=residuals, names=NAMES, step=step)
        require_same_everywhere(world, outs, f"all ranks hold the same bits after step {step}")
        for spec, out in zip(SPECS, outs, strict=True):
            require(world, (out.dtype, tuple(out.shape)) == (spec.dtype, spec.shape), f"{spec} comes back as it was")


def nothing_is_lost_only_late(world: World, compressor: Compressor) -> None:
    """What all ranks passed is what came out, and what residuals keep; to rounding, over all steps."""
    residuals, ways = Residuals(), algorithms_of(world, compressor, BUCKET_BYTES)
    given, came = ([torch.zeros(spec.shape).double() for spec in SPECS] for _ in range(2))
    for step in range(STEPS):
        xs = tensors(world, step)
        outs = hierarchical_sync(xs, compressor, world=world, residuals=residuals, names=NAMES, step=step)
        for total, mean in zip(given, means(world, step), strict=True):
            total += mean
        for total, out in zip(came, outs, strict=True):
            total += out.cpu().double()
    for spec, passed, got in zip(SPECS, given, came, strict=True):
        late = kept_of(world, residuals, spec, compressor)
        allowed = rounding(world, spec, compressor, ways[spec.name]) * STEPS * mean_norm(world, spec, STEPS)
        require_close(world, got + late, passed, allowed, f"{spec}: nothing is lost, only late")


def everything_sent_is_the_mean(world: World, compressor: Compressor) -> None:
    """Asked of the dense algorithm, and of compressors that leave nothing out and write numbers, not signs."""
    xs, expected, ways = tensors(world, 0), means(world, 0), algorithms_of(world, compressor, BUCKET_BYTES)
    whole = hierarchical_sync(xs, compressor, world=world, names=NAMES, step=0, algorithm="dense")
    outs = hierarchical_sync(xs, compressor, world=world, names=NAMES, step=0)
    for spec, got, out, mean in zip(SPECS, whole, outs, expected, strict=True):
        size, written = mean_norm(world, spec, 1), written_exactly_to(spec, compressor)
        allowed = rounding(world, spec, compressor, "dense") * size
        require_close(world, got, mean, allowed, f"{spec}: the dense algorithm gives the mean")
        if written is not None:
            allowed = (rounding(world, spec, compressor, ways[spec.name]) + written) * size
            require_close(world, out, mean, allowed, f"{spec}: everything sent is the mean")


def bucketing_is_invisible(world: World, compressor: Compressor) -> None:
    """Where more than two are summed on the way, to the rounding of sums, whose order is the transport's."""
    ways = algorithms_of(world, compressor, BUCKET_BYTES)
    first, *others = (_after_some_steps(world, compressor, nbytes) for nbytes in (BUCKET_BYTES, 10_000, 1))
    for other in others:
        for spec, got, expected in zip(SPECS, other, first, strict=True):
            law = f"{spec}: any size of buckets gives the same"
            if ways[spec.name] in SUMMED and world.inter.size > 2:
                allowed = rounding(world, spec, compressor, ways[spec.name]) * STEPS * mean_norm(world, spec, STEPS)
                require_close(world, got, expected, allowed, law)
            else:
                require_equal(world, got, expected, law)


def _after_some_steps(world: World, compressor: Compressor, nbytes: int) -> list[Tensor]:
    options: dict[str, Any] = {"world": world, "residuals": Residuals(), "names": NAMES, "bucket_bytes": nbytes}
    outs = [hierarchical_sync(tensors(world, step), compressor, **(options | {"step": step})) for step in range(STEPS)]
    return outs[-1]


def a_bucket_takes_one_collective_between_nodes(world: World, compressor: Compressor) -> None:
    """Two, if lengths depend on the data, or if nodes average shares for each other."""
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
    """Those that send the same agree to the bit; to rounding, where values are summed under way."""
    xs, kept = tensors(world, 0), tensors(world, 0)
    by_way: dict[str, list[Tensor]] = {}
    for algorithm in get_args(AlgorithmOption):
        try:
            outs = hierarchical_sync(xs, compressor, world=world, names=NAMES, step=0, algorithm=algorithm)
        except InvalidArgumentError:
            continue
        require_same_everywhere(world, outs, f"all ranks hold the same bits by {algorithm}")
        for spec, x, made in zip(SPECS, xs, kept, strict=True):
            require_equal(world, x, made, f"{algorithm} leaves the input {spec} as it was")
        by_way[algorithm] = outs
    require(world, {"auto", "dense", "gatherv"} <= set(by_way), "auto, dense and gatherv carry any compressor")
    for way in {"gather", "two_phase", "reduce"} & set(by_way):
        for spec, got, expected in zip(SPECS, by_way[way], by_way["gatherv"], strict=True):
            law = f"{spec}: {way} gives what gatherv gives"
            if way in SUMMED:
                require_close(
                    world, got, expected, rounding(world, spec, compressor, way) * mean_norm(world, spec, 1), law
                )
            else:
                require_equal(world, got, expected, law)


def handles_give_what_blocking_calls_give(world: World, compressor: Compressor) -> None:
    """Even ranks wait for the first one first, odd ranks for the last."""

    def options(step: int) -> dict[str, Any]:
        return {"world": world, "residuals": Residuals(), "names": NAMES, "step": step}

    blocking = [hierarchical_sync(tensors(world, step), compressor, **options(step)) for step in range(STEPS)]
    handles = [start_sync(tensors(world, step), compressor, **options(step)) for step in range(STEPS)]
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
        options: dict[str, Any] = {"world": world, "names": NAMES, "step": step}
        xs, untouched = tensors(world, step), tensors(world, step)
        expected = hierarchical_sync(xs, compressor, **options)
        returned = start_sync(xs, compressor, **(options | {"out": outs})).wait()
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
        everybodys = world.inter.all_gather(digest_of(outs).to(world.device)).wait()
        require(world, bool((everybodys == everybodys[0]).all()), "ranks of equal local rank hold the same bits")
    outs = start_exchange(shards, compressor, world=world, step=0, algorithm="dense").wait()
    for spec, out in zip(specs, outs, strict=True):
        rows = torch.stack([make(spec, rank, 0, torch.device("cpu")).double() for rank in peers])
        size = float(rows.view(len(peers), -1).norm(dim=1).mean())
        allowed = rounding(world, spec, compressor, "dense") * size
        require_close(world, out, rows.mean(dim=0), allowed, f"{spec}: shards are averaged over nodes")
    require_works(world)


def a_nan_is_everybodys_affair(world: World, compressor: Compressor) -> None:
    """One rank has a NaN; all do what was asked for, and residuals stay as they were where nothing was sent."""
    residuals, twin = Residuals(), Residuals()

    def sync(xs: list[Tensor], nonfinite: NonFinitePolicy, memory: Residuals, step: int = 1) -> list[Tensor]:
        options: dict[str, Any] = {"residuals": memory, "names": NAMES, "step": step, "nonfinite": nonfinite}
        return hierarchical_sync(xs, compressor, **(options | {"world": world}))

    sync(tensors(world, 0), "raise", residuals, step=0)
    before = {name: state.clone() for name, state in residuals.state_dict().items()}
    ill, well = tensors(world, 1), tensors(world, 1)
    if world.topology.rank == world.topology.size - 1:
        for name, value in (("matrix", torch.nan), ("brain", torch.inf), ("double", -(2.0**100))):
            ill[NAMES.index(name)].view(-1)[-1] = value
            well[NAMES.index(name)].view(-1)[-1] = 0.0
    raised = error_of(lambda: sync(ill, "raise", residuals))
    require(world, isinstance(raised, NonFiniteError), f"a NaN raises NonFiniteError everywhere, but got {raised!r}")
    require_states(world, residuals, before, "raising leaves residuals as they were")
    skipped = world.stats()["skipped"]
    for spec, out in zip(SPECS, sync(ill, "skip", residuals), strict=True):
        require_equal(world, out, torch.zeros_like(out), f"{spec}: what is skipped is zero")
    require(world, world.stats()["skipped"] == skipped + 1, "what is skipped is counted")
    require_states(world, residuals, before, "skipping leaves residuals as they were")
    twin.load_state_dict(before)
    expected = sync(well, "raise", twin)
    for spec, got, out in zip(SPECS, sync(ill, "zero", residuals), expected, strict=True):
        require_equal(world, got, out, f"{spec}: a NaN counts as zero")
    require_states(world, residuals, twin.state_dict(), "a NaN counts as zero in residuals")


def other_settings_are_found_by_all(world: World, compressor: Compressor) -> None:
    """The last rank passes another shape, dtype, name, or compressor; all are told what differs."""
    if world.topology.size == 1:
        return
    alone = world.topology.rank == world.topology.size - 1
    x = torch.ones(70, 33, device=world.device)
    cases: dict[str, tuple[Tensor, str, Compressor]] = {
        r"tensor 0: .*70, 33.*69, 33": (x[:-1], "agreed", compressor),
        r"tensor 0: .*float32.*bfloat16": (x.bfloat16(), "agreed", compressor),
        r"tensor 0: .*agreed.*other": (x, "other", compressor),
        r"compressor: ": (x, "agreed", top_k(0.123)),
    }
    for words, theirs in cases.items():
        mine, name, chosen = theirs if alone else (x, "agreed", compressor)
        raised = error_of(lambda: hierarchical_sync([mine], chosen, world=world, names=[name], step=0))  # noqa: B023  (called at once)
        require_mismatch(world, raised, words)
    require_works(world)


def another_step_is_found_by_all(world: World, compressor: Compressor) -> None:
    """Found by what travels, for steps are not compared beforehand; residuals stay as they were."""
    if world.topology.size == 1:
        return
    alone = world.topology.rank == world.topology.size - 1
    # Dense sums carry no headers, and tell by other means.
    cases: list[dict[str, Any]] = [{"bucket_bytes": 10_000}, {"bucket_bytes": BUCKET_BYTES}, {"algorithm": "dense"}]
    for case in cases:
        residuals = Residuals()
        options: dict[str, Any] = {"world": world, "names": NAMES, "residuals": residuals, **case}

        def sync(step: int, options: dict[str, Any] = options) -> list[Tensor]:
            return hierarchical_sync(tensors(world, 0), compressor, **(options | {"step": step}))

        sync(0)
        before = {name: state.clone() for name, state in residuals.state_dict().items()}
        raised = error_of(lambda: sync(2 if alone else 1))
        require_mismatch(world, raised, "step")
        require_states(world, residuals, before, "a call that fails leaves residuals as they were")
        require_same_everywhere(world, sync(3), "all ranks hold the same bits after a failed call")


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
    """Also of ranks that keep no part of them; and the calls after that work."""
    x, residuals = torch.ones(3, 70, device=world.device), Residuals()
    options: dict[str, Any] = {"world": world, "residuals": residuals, "step": 0}
    hierarchical_sync(x, demo(k=2, chunk=64), **options)
    before = {name: state.clone() for name, state in residuals.state_dict().items()}
    raised = error_of(lambda: hierarchical_sync(x, demo(k=2, chunk=32), **options))
    kept = bool(before)
    fits = isinstance(raised, InvalidTensorError if kept else NonFiniteError)
    require(world, fits, f"all are told that residuals do not fit, but got {raised!r}")
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
