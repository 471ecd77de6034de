"""The laws of compressors, held by any object with the methods of :class:`flexcomm.Compressor`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor

from flexcomm.codec import Decoder, Encoder, is_dense, plan_buffer
from flexcomm.compress import Compressor, TensorSpec, dense
from flexcomm.kernels import Average, Kernels, ReferenceKernels, StateUpdate, ValueCode, choose_kernels
from flexcomm.kernels.layout import ALIGNMENT, HEADER_NBYTES
from flexcomm.testing.cases import (
    DTYPES,
    coefficients_of,
    decode,
    elements_of,
    encode,
    numbers,
    require,
    require_equal,
    sent_coefficients,
    with_gaps,
)

SHAPES = ((), (0,), (1,), (7,), (61,), (3, 0, 2), (1, 9), (9, 1), (5, 13), (24, 20), (3, 4, 5), (2, 3, 4, 5), (130,))
SPECS = tuple(
    TensorSpec(f"{str(DTYPES[number % 4])[6:]}{list(shape)}", shape, DTYPES[number % 4])
    for number, shape in enumerate((*SHAPES, *SHAPES[::-1]))
)
FEW_SPECS = SPECS[: len(SHAPES)]
NODES = ("node 0", "node 1", "node 2")


def check_compressor(compressor: Compressor, kernels: Kernels | None = None, device: str = "cpu") -> None:
    """Raise ``AssertionError`` unless ``compressor`` keeps every law. One process calls it.

    Args:
        compressor: any object with the methods of :class:`flexcomm.Compressor`.
        kernels: what encodes and decodes; None: the kernels that the library uses on the device.
        device: where the tensors lie.

    Raises:
        AssertionError: naming the broken law and the tensor.

    Example:
        >>> import flexcomm
        >>> from flexcomm.testing import check_compressor
        >>> check_compressor(flexcomm.sign())

    """
    chosen = kernels or choose_kernels(torch.device(device))
    for law in COMPRESSOR_LAWS:
        law(compressor, chosen, device)


def it_is_a_value(compressor: Compressor, kernels: Kernels, device: str) -> None:  # noqa: ARG001
    """Ranks compare the repr of compressors, so an address in it would make equal ones differ."""
    twin = copy.deepcopy(compressor)
    require(compressor, twin == compressor, "equal settings compare equal")
    require(compressor, hash(twin) == hash(compressor), "equal settings hash alike")
    require(compressor, repr(twin) == repr(compressor), "equal settings print alike")
    require(compressor, " at 0x" not in repr(compressor), "settings are printed, not an address")
    require(compressor, compressor != object(), "it equals nothing else")


def a_tensor_is_always_planned_alike(compressor: Compressor, kernels: Kernels, device: str) -> None:  # noqa: ARG001
    twin = copy.deepcopy(compressor)
    for spec in SPECS:
        plan = compressor.plan(spec)
        require(compressor, compressor.plan(spec) == plan == twin.plan(spec), f"{spec} is always planned alike")
        require(compressor, plan.rows * plan.cols == math.prod(spec.shape), f"the plan of {spec} is all of it")


def nothing_is_lost_only_late(compressor: Compressor, kernels: Kernels, device: str) -> None:
    """``decay * state + gain * coefficients == decoded + state_out``, to the bit.

    A float minus what it was rounded to is a float. Not so for signs: a small number minus a scale much larger is
    rounded, to half a unit in the last place of the result, which is no larger than the larger of both.
    """
    for spec in SPECS:
        plan, x = compressor.plan(spec), make(spec, device)
        state, update = numbers("normal", plan.state_shape, 7).to(device), StateUpdate(decay=0.875, gain=0.75)
        before, rest = coefficients_of(kernels, x, plan, state, update).double(), torch.empty_like(state)
        sent = encode(kernels, x, plan, state, rest, update, step=5, name=spec.name)
        decoded, late = sent_coefficients(kernels, sent).double(), rest.double()
        lost = (before - decoded - late).abs()
        largest = torch.maximum(before.abs(), decoded.abs())
        allowed = largest * 2.0**-23 if not _is_rounded(plan.values) else torch.zeros_like(lost)
        require(compressor, bool((lost <= allowed).all()), f"{spec}: nothing is lost, but {float(lost.sum())} was")
        untouched = late[decoded == 0] == before[decoded == 0]
        require(compressor, bool(untouched.all()), f"{spec}: what is not sent is kept as it is")


def payload_and_remainder_make_the_tensor(compressor: Compressor, kernels: Kernels, device: str) -> None:
    """Rounding: the transform there and back in float32, and twice the output's own dtype."""
    for spec in SPECS:
        plan, x = compressor.plan(spec), make(spec, device)
        late, out = torch.zeros(plan.state_shape, device=device), torch.empty_like(x)
        decode(kernels, encode(kernels, x, plan, late, late, step=3, name=spec.name), plan, out)
        restored = out.float() + elements_of(kernels, late, plan).reshape(spec.shape)
        allowed = (2.0**-20 + 2 * torch.finfo(spec.dtype).eps) * (x.float().norm() + out.float().norm())
        require_close(compressor, restored, x.float(), float(allowed), f"{spec}: payload and remainder make the tensor")


def nothing_grows(compressor: Compressor, kernels: Kernels, device: str) -> None:  # noqa: ARG001
    """A payload is no longer than the tensor, in the tensor's dtype or the one that ``dense`` was told.

    Chunks are equally long, so the last one may hold one spare element for each of the others; and they begin at words.
    """
    for spec in (*SPECS, TensorSpec("long", (3, 12347), torch.bfloat16)):
        bucket, asked, native = plan_buffer((spec,), compressor), compressor.plan(spec), dense().plan(spec)
        whole = asked if is_dense(asked) else native
        most = HEADER_NBYTES + (math.prod(spec.shape) + 2 * whole.chunks) * whole.values.format.bits // 8 + ALIGNMENT
        fits = bucket.variable_length or bucket.nbytes <= most
        require(compressor, fits, f"{spec} takes {bucket.nbytes}, whole at most {most}")


def every_coefficient_is_sent_in_due_time(compressor: Compressor, kernels: Kernels, device: str) -> None:
    """Every coefficient grows by the same with every step, so one that was never sent is among the largest in the end.

    Indices that all ranks derive alike know no magnitudes: they meet every coefficient before any is met again.
    """
    for spec in (TensorSpec("flat", (37,), torch.float32), TensorSpec("square", (12, 20), torch.float32)):
        plan, x = compressor.plan(spec), torch.zeros(spec.shape, device=device)
        whole = plan.chunks * plan.chunk_numel
        rounds = math.ceil(whole / plan.entries)
        steps = math.ceil(plan.chunk_numel / plan.k) if plan.selection.rule.sample_key else 8 * rounds + 8
        # Magnitudes from 1 to 2 of either sign, no two alike.
        order = torch.randperm(whole, generator=torch.Generator().manual_seed(1)).view(plan.state_shape).to(device)
        gains = (1.0 + order / whole) * (1 - 2 * (order % 2)) * (plan.tau / 2 or 1.0)
        state, reached = torch.zeros_like(gains), torch.zeros_like(gains, dtype=torch.bool)
        for step in range(steps):
            state += gains
            sent = encode(kernels, x, plan, state, state, step=step, name=spec.name)
            reached |= sent_coefficients(kernels, sent) != 0
        missed = int((~reached).sum())
        require(compressor, missed == 0, f"{spec}: every coefficient is sent within {steps} steps, but not {missed}")


def bucketing_is_invisible(compressor: Compressor, kernels: Kernels, device: str) -> None:
    tensors = [[make(spec, device, node) for spec in SPECS] for node, _ in enumerate(NODES)]
    together = exchange(compressor, kernels, SPECS, tensors)
    for size in (1, 4):
        parts = [slice(begin, begin + size) for begin in range(0, len(SPECS), size)]
        apart = [
            out for part in parts for out in exchange(compressor, kernels, SPECS[part], [row[part] for row in tensors])
        ]
        for spec, one, other in zip(SPECS, together, apart, strict=True):
            require_equal(compressor, other, one, f"{spec} in buckets of {size} tensors")


def any_shape_and_dtype_gives_the_references_bits(compressor: Compressor, kernels: Kernels, device: str) -> None:
    tensors = [[make(spec, device, node) for spec in FEW_SPECS] for node in range(2)]
    gaps = [[with_gaps(x) for x in row] for row in tensors]
    there = [[x.cpu() for x in row] for row in tensors]
    for average in get_args(Average):
        expected = exchange(compressor, ReferenceKernels(), FEW_SPECS, there, 1, average)
        for inputs in (tensors, gaps):
            outs = exchange(compressor, kernels, FEW_SPECS, inputs, 1, average)
            for spec, got, out in zip(FEW_SPECS, outs, expected, strict=True):
                require(compressor, bool(got.isfinite().all()), f"{spec}: what is decoded is finite")
                require_equal(compressor, got.cpu(), out, f"{spec}: as the reference decodes it, over {average}")


def sending_everything_gives_the_mean(compressor: Compressor, kernels: Kernels, device: str) -> None:
    """To rounding, in norm: of the value code, of a transform in float32, of the output's dtype.

    Untransformed small whole numbers in float32: to the bit. Not for signs, whose one magnitude for all is no rounding.
    int8 rounds to half a level of a chunk's largest coefficient, which is no larger than the chunk's norm.
    """
    for spec in SPECS:
        plan = plan_buffer((spec,), compressor).plans[0]
        if not plan.sends_everything or not _is_rounded(plan.values):
            continue
        rows = [[numbers("ties", spec.shape, node).mul(4).to(device, spec.dtype)] for node, _ in enumerate(NODES)]
        mean = torch.stack([row[0].double() for row in rows]).sum(dim=0) / len(NODES)
        out = exchange(compressor, kernels, (spec,), rows)[0]
        if plan.values is ValueCode.FP32 and not plan.transformed:
            exact = torch.stack([row[0].float() for row in rows]).sum(dim=0) / float(len(NODES))
            # Adding 0 makes all zeros alike, whichever sign they add up to.
            require_equal(compressor, out + 0.0, exact.to(spec.dtype) + 0.0, f"{spec}: the mean of integers is exact")
        of_own, of_largest = plan.values.format.rounding or 0.0, plan.values.format.chunk_rounding or 0.0
        code = of_own + math.sqrt(plan.chunk_numel) * of_largest
        rounding = code + 2.0**-20 + torch.finfo(spec.dtype).eps
        size = sum(float(row[0].double().norm()) for row in rows) / len(NODES)
        require_close(compressor, out.double(), mean, rounding * size, f"{spec}: everything sent is the mean")


COMPRESSOR_LAWS: tuple[Callable[[Compressor, Kernels, str], None], ...] = (
    it_is_a_value,
    a_tensor_is_always_planned_alike,
    nothing_is_lost_only_late,
    payload_and_remainder_make_the_tensor,
    nothing_grows,
    every_coefficient_is_sent_in_due_time,
    bucketing_is_invisible,
    any_shape_and_dtype_gives_the_references_bits,
    sending_everything_gives_the_mean,
)


def _is_rounded(code: ValueCode) -> bool:
    """Return whether a code writes values nearly as they are; signs take another magnitude for many."""
    return code.format.rounding is not None or code.format.chunk_rounding is not None


def make(spec: TensorSpec, device: str, node: int = 0) -> Tensor:
    return numbers("normal", spec.shape, SPECS.index(spec) + 100 * node).to(device, spec.dtype)


def exchange(
    compressor: Compressor,
    kernels: Kernels,
    specs: tuple[TensorSpec, ...],
    tensors: Sequence[Sequence[Tensor]],
    steps: int = 3,
    average: Average = "nodes",
) -> list[Tensor]:
    """Return the outputs of the last step, the same on all nodes; every step sends the residuals of the one before."""
    plan = plan_buffer(specs, compressor)
    outs = [torch.empty_like(x) for x in tensors[0]]
    states = [
        [torch.zeros(one.state_shape, device=x.device) for one, x in zip(plan.plans, row, strict=True)]
        for row in tensors
    ]
    for step in range(steps):
        buffers = []
        for row, held in zip(tensors, states, strict=True):
            buffer = torch.empty(plan.nbytes, dtype=torch.uint8, device=row[0].device)
            encoder = Encoder(plan, buffer, kernels)
            problem = encoder.encode_(row, held, held, step=step, sequence=step)
            require(compressor, not problem, f"finite tensors are encoded: {problem}")
            buffers.append(buffer[: encoder.nbytes])
        nbytes = [buffer.numel() for buffer in buffers]
        decoder = Decoder(plan, torch.cat(buffers), NODES[: len(buffers)], kernels, nbytes)
        require(compressor, decoder.verify(step=step, sequence=step) == [], "what was encoded is sound")
        decoder.decode_(outs, step=step, average=average)
    return outs


def require_close(compressor: Compressor, got: Tensor, expected: Tensor, allowed: float, law: str) -> None:
    distance = float((got.double() - expected.double()).norm())
    require(compressor, distance <= allowed, f"{law}, to {allowed:.3g}, but they are {distance:.3g} apart")
