"""The verbs: average tensors over all ranks, in full inside a node, compressed between nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from flexcomm.codec import TensorShard
from flexcomm.compress import Compressor, TensorSpec
from flexcomm.device import KINDS, empty_like
from flexcomm.errors import CompressorError, InvalidArgumentError, InvalidTensorError
from flexcomm.kernels import Average
from flexcomm.sync.call import SyncHandle, T
from flexcomm.sync.engine import engine_of, legs_of_threads
from flexcomm.sync.plan import AlgorithmOption, NonFinitePolicy, SyncPlan, SyncSettings
from flexcomm.sync.residuals import Residuals
from flexcomm.world import World, default_world

BUCKET_BYTES = 16 << 20  # dense bytes of a bucket; docs/benchmarks.md shows what other sizes cost


def hierarchical_sync(
    tensors: T,
    compressor: Compressor,
    *,
    world: World | None = None,
    residuals: Residuals | None = None,
    names: Sequence[str] | None = None,
    step: int | None = None,
    average: Average = "nodes",
    algorithm: AlgorithmOption = "auto",
    nonfinite: NonFinitePolicy = "raise",
    bucket_bytes: int | None = BUCKET_BYTES,
    out: Tensor | Sequence[Tensor] | None = None,
) -> T:
    """Return the average of every rank's tensor, or tensors, as far as ``compressor`` sends it between nodes.

    All ranks call it with equal shapes, dtypes and arguments, and hold the same bits afterwards. Inputs are not
    changed, unless they are ``out``; a call that raises changes no output, and residuals not at all, or to rounding
    (see :class:`Residuals`).

    Args:
        tensors: a tensor, or a list of them on one device.
        compressor: what is sent between nodes, such as ``flexcomm.demo(k=32)``; see docs/compressors.md.
        world: the ranks; those that ``flexcomm.connect()`` finds, if none are given.
        residuals: keeps what was not sent and adds it to the next call (error feedback).
        names: what tensors are called in residuals and messages; their positions, if not given.
        step: which coordinates random and striding compressors send; calls are counted, if not given.
        average: divide by the number of ``"nodes"``, or coefficient by coefficient by that of ``"contributors"``, the
            nodes that sent it.
        algorithm: how buckets cross between nodes; ``"auto"`` takes the one that sends the fewest bytes.
        nonfinite: what NaN, infinity or a magnitude of 2**100 on any rank does on all ranks: ``"raise"``; ``"skip"``
            the call, so that all outputs are zero and residuals stay; ``"zero"``: only such elements count as zero.
        bucket_bytes: dense bytes of the tensors that travel together in one collective; None: all tensors of a dtype.
        out: where the averages are written, instead of new tensors: shaped as the inputs, contiguous, each its input
            itself or in memory of its own.

    Raises:
        ConfigMismatchError: ranks passed different tensors or arguments; it names them.
        NonFiniteError: a rank had NaN, infinity or a magnitude of 2**100 or more.
        WireError: a payload was damaged; it names the sender. Sums (``reduce``, ``dense``) travel without checksum.
        TransportError: a rank is gone or did not answer within the world's ``timeout_s``.

    Example:
        >>> import torch, flexcomm
        >>> residuals = flexcomm.Residuals()
        >>> with flexcomm.connect() as world:
        ...     x = torch.arange(8.0)
        ...     flexcomm.hierarchical_sync(x, flexcomm.top_k(1 / 4), world=world, residuals=residuals)
        tensor([0., 0., 0., 0., 0., 0., 6., 7.])

    """
    where = (world or default_world(), True, False)
    return _start(
        *where, tensors, compressor, residuals, names, step, average, algorithm, nonfinite, bucket_bytes, out
    ).wait()


def start_sync(
    tensors: T,
    compressor: Compressor,
    *,
    world: World | None = None,
    residuals: Residuals | None = None,
    names: Sequence[str] | None = None,
    step: int | None = None,
    average: Average = "nodes",
    algorithm: AlgorithmOption = "auto",
    nonfinite: NonFinitePolicy = "raise",
    bucket_bytes: int | None = BUCKET_BYTES,
    out: Tensor | Sequence[Tensor] | None = None,
) -> SyncHandle[T]:
    """Start :func:`hierarchical_sync`, which explains the arguments, and return a handle.

    Compute, then ``handle.wait()``; until then, the inputs must not change. Tensors on the CPU are encoded, sent and
    received by comm threads meanwhile; tensors on a GPU are on their way between nodes when this returns.

    Example:
        >>> import torch, flexcomm
        >>> with flexcomm.connect() as world:
        ...     handle = flexcomm.start_sync(torch.ones(3), flexcomm.dense(), world=world)
        ...     handle.wait()
        tensor([1., 1., 1.])

    """
    where = (world or default_world(), True, True)
    return _start(*where, tensors, compressor, residuals, names, step, average, algorithm, nonfinite, bucket_bytes, out)


def start_exchange(
    shards: T,
    compressor: Compressor,
    *,
    world: World | None = None,
    residuals: Residuals | None = None,
    names: Sequence[str] | None = None,
    step: int | None = None,
    average: Average = "nodes",
    algorithm: AlgorithmOption = "auto",
    nonfinite: NonFinitePolicy = "raise",
    bucket_bytes: int | None = BUCKET_BYTES,
    out: Tensor | Sequence[Tensor] | None = None,
) -> SyncHandle[T]:
    """Start the inter-node leg alone: for shards that were averaged inside the node before, as FSDP does.

    The arguments are those of :func:`hierarchical_sync`. Ranks of equal local rank pass equal shapes; the ranks of a
    node may hold unequal ones. Only the former agree on what is done about nonfinite values.

    Example:
        >>> import torch, flexcomm
        >>> with flexcomm.connect() as world:
        ...     flexcomm.start_exchange(torch.ones(3), flexcomm.dense(), world=world).wait()
        tensor([1., 1., 1.])

    """
    where = (world or default_world(), False, True)
    return _start(*where, shards, compressor, residuals, names, step, average, algorithm, nonfinite, bucket_bytes, out)


def plan_sync(
    tensors: Sequence[Tensor],
    compressor: Compressor,
    *,
    world: World,
    all_ranks: bool = True,
    in_background: bool = False,
    names: Sequence[str] | None = None,
    average: Average = "nodes",
    algorithm: AlgorithmOption = "auto",
    nonfinite: NonFinitePolicy = "raise",
    bucket_bytes: int | None = BUCKET_BYTES,
    has_residuals: bool = False,
) -> SyncPlan:
    """Return what follows from shapes and arguments, for calls of :func:`start_planned`. Sends nothing.

    Args:
        tensors: what will be synchronised; only shapes, dtypes and the device matter.
        compressor: what is sent between nodes.
        world: the ranks.
        all_ranks: True to average over all ranks, False for the inter-node leg alone, as :func:`start_exchange`.
        in_background: whether comm threads drive the calls where they can, while the caller computes.
        names: as for :func:`hierarchical_sync`, like the arguments below.
        average: what sums are divided by.
        algorithm: how buckets cross between nodes.
        nonfinite: what NaN and infinity do.
        bucket_bytes: dense bytes of a bucket.
        has_residuals: whether the calls will have residuals.

    """
    topology, device = world.topology, _device_of(tensors)
    local_size, local_rank = (world.intra.size, world.intra.rank) if all_ranks else (1, 0)
    groups = topology.inter_groups if all_ranks else [topology.inter_groups[topology.local_rank]]
    return SyncPlan(
        SyncSettings(_specs_of(tensors, names), compressor, average, algorithm, nonfinite, bucket_bytes, has_residuals),
        device,
        world.inter.size,
        world.inter.rank,
        local_size,
        local_rank,
        all_ranks,
        in_background and legs_of_threads(world, device) != (),
        in_background,
        [[f"rank {member} (node {node})" for node, member in enumerate(group)] for group in groups],
        world.inter.timeout_s,
    )


def start_planned(
    plan: SyncPlan,
    tensors: list[Tensor],
    *,
    world: World,
    residuals: Residuals | None = None,
    step: int | None = None,
    out: list[Tensor] | None = None,
) -> SyncHandle[list[Tensor]]:
    """Start a call whose plan was made by :func:`plan_sync`, for tensors of the same shapes and dtypes.

    Args:
        plan: made in the same world.
        tensors: as many as were planned, in the same order.
        world: the world of the plan.
        residuals: given if and only if the plan was made with ``has_residuals``.
        step: as for :func:`hierarchical_sync`.
        out: as for :func:`hierarchical_sync`.

    """
    for x, (name, shape, dtype) in zip(tensors, plan.settings.specs, strict=True):
        if x.shape != shape or x.dtype != dtype:
            planned = f"{dtype} {list(shape)}: plan anew for it."
            raise InvalidTensorError(f"{name} is {x.dtype} {list(x.shape)}, but was planned as {planned}")
    if out is None:
        out = [empty_like(x) for x in tensors]
    else:
        check_outputs(tensors, out, plan.names)
    handle: SyncHandle[list[Tensor]] = SyncHandle(world, plan, tensors, out, residuals, step)
    handle.start()
    return handle


def shards_held(plan: SyncPlan) -> list[TensorShard | None]:
    """Return, for each tensor of a plan, the shard whose state this rank's residuals hold by its name, if they do."""
    held = dict(numbered for bucket in plan.buckets for numbered in bucket.shards[plan.local_rank])
    return [held.get(number) for number in range(len(plan.names))]


def _start(
    world: World,
    all_ranks: bool,
    in_background: bool,
    tensors: T,
    compressor: Compressor,
    residuals: Residuals | None,
    names: Sequence[str] | None,
    step: int | None,
    average: Average,
    algorithm: AlgorithmOption,
    nonfinite: NonFinitePolicy,
    bucket_bytes: int | None,
    out: Tensor | Sequence[Tensor] | None,
) -> SyncHandle[T]:
    given: Any = tensors  # a Tensor or a list of them, which mypy sees one at a time
    is_single = isinstance(given, Tensor)
    xs: list[Tensor] = [given] if is_single else list(given)
    settings: dict[str, Any] = {
        "compressor": compressor,
        "all_ranks": all_ranks,
        "in_background": in_background,
        "names": None if names is None else tuple(names),
        "average": average,
        "algorithm": algorithm,
        "nonfinite": nonfinite,
        "bucket_bytes": bucket_bytes,
        "has_residuals": residuals is not None,
    }
    shapes, dtypes = tuple([x.shape for x in xs]), tuple([x.dtype for x in xs])
    key = (shapes, dtypes, frozenset([x.device for x in xs]), *settings.values())
    plans = engine_of(world).plans
    try:
        plan: SyncPlan | None = plans.get(key)
    except TypeError as error:
        raise CompressorError(
            f"{compressor!r} cannot be hashed ({error}): make it a frozen dataclass, so that its plans can be kept."
        ) from error
    if plan is None:
        plan = plans[key] = plan_sync(xs, world=world, **settings)
    outputs = None if out is None else [out] if isinstance(out, Tensor) else list(out)
    handle: Any = start_planned(plan, xs, world=world, residuals=residuals, step=step, out=outputs)
    if is_single:
        handle.result = handle.result[0]
    return cast("SyncHandle[T]", handle)


def _specs_of(tensors: Sequence[Tensor], names: Sequence[str] | None) -> tuple[TensorSpec, ...]:
    if names is None:
        names = tuple(str(number) for number in range(len(tensors)))
    if len(names) != len(tensors) or len(set(names)) != len(names) or not all(isinstance(one, str) for one in names):
        needed = f"{len(tensors)} tensors need as many names, all different strings"
        raise InvalidArgumentError(f"{needed}, but got {list(names)}: pass one for each.")
    if taken := [name for name in names if re.search(r"\[\d+:\d+\]$", name)]:
        raise InvalidArgumentError(f"{', '.join(taken)}: such names stand for shards of tensors; choose others.")
    return tuple(TensorSpec(name, tuple(x.shape), x.dtype) for name, x in zip(names, tensors, strict=True))


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise InvalidTensorError(f"the tensors of one call are on {listed}: move them to one, or call once for each.")
    device = devices.pop() if devices else torch.device("cpu")
    if device.type not in KINDS or any(x.layout is not torch.strided for x in tensors):
        layouts = ", ".join(sorted({str(x.layout) for x in tensors}))
        raise InvalidTensorError(f"got {layouts} on {device}: make them dense tensors on {' or '.join(KINDS)}.")
    return device


def check_outputs(tensors: Sequence[Tensor], outputs: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise unless every output is as its tensor is, contiguous, and in memory that only its own tensor may use."""
    if len(outputs) != len(tensors):
        raise InvalidArgumentError(
            f"out has {len(outputs)} tensors for {len(tensors)} to be averaged: pass one for each."
        )
    for name, x, out in zip(names, tensors, outputs, strict=True):
        if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
            gaps = "" if out.is_contiguous() else ", not contiguous"
            raise InvalidTensorError(
                f"out for {name} is {out.dtype} {list(out.shape)} on {out.device}{gaps}, but must be contiguous "
                f"{x.dtype} {list(x.shape)} on {x.device}: make it by torch.empty."
            )
    # A tensor that its own average is written over counts once.
    apart = [
        number
        for number, (x, out) in enumerate(zip(tensors, outputs, strict=True))
        if x.data_ptr() != out.data_ptr() or not x.is_contiguous()
    ]
    everything = [*[tensors[number] for number in apart], *outputs]
    begins = np.array([x.data_ptr() for x in everything])
    ends = begins + np.array([_extent(x) for x in everything], np.int64)
    order = begins.argsort()
    if np.all(ends[order[:-1]] <= begins[order[1:]]):
        return
    # Something shares memory: inputs may, but an output must meet nothing else.
    labels = [*[f"the tensor {names[number]}" for number in apart], *[f"out for {name}" for name in names]]
    reaching = reaching_output = (0, 0)
    for number in order.tolist():
        is_output, begin, end = number >= len(apart), int(begins[number]), int(ends[number])
        other_end, other = reaching if is_output else reaching_output
        if begin < other_end and end > begin:
            raise InvalidTensorError(
                f"{labels[number]} shares memory with {labels[other]}: make out by torch.empty_like."
            )
        reaching = max(reaching, (end, number))
        if is_output:
            reaching_output = max(reaching_output, (end, number))


def _extent(x: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if x.is_contiguous():
        return x.nbytes
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1) * x.itemsize
