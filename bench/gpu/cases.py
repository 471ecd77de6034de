"""What is counted: buckets of one tensor, encoded, verified and decoded on the host by the kernels' real launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, SupportsInt

import torch
from torch import Tensor

from bench.gpu.count import CountingLauncher, Launch
from flexcomm import Compressor, Epilogue, TensorSpec, demo, dense, striding, top_k
from flexcomm.codec import plan_buffer
from flexcomm.kernels import Average, ReferenceKernels, Region, StateUpdate
from flexcomm.kernels.gpu import GpuKernels

VERBS = ("encode", "verify", "decode", "rollback", "mix")
_USUAL, _ENCODE, _DECODE = ("encode", "verify", "decode"), ("encode",), ("decode",)
_UPDATE = StateUpdate(decay=0.95)
_SIGN_STEP = Epilogue("sign_step", lr=1e-3, keep=0.999)
_SIDE = 64
_ALLOCATION = 512
"""What CUDA's allocations are aligned to, in bytes."""
_REFERENCE = ReferenceKernels()
_BF16_VALUES = demo(k=32, chunk=_SIDE)


def _noise(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))


def _pink(rows: int, cols: int) -> Tensor:
    """Return numbers whose spectrum falls with frequency, as that of gradients often does."""
    spectrum = torch.fft.rfft2(_noise(rows, cols))
    frequencies = 1 + torch.arange(rows)[:, None].minimum(rows - torch.arange(rows)[:, None])
    x: Tensor = torch.fft.irfft2(spectrum / (frequencies + torch.arange(spectrum.shape[1])), s=(rows, cols))
    return x


def _one_column(rows: int, cols: int) -> Tensor:
    x = torch.zeros(rows, cols)
    x[:, ::_SIDE] = _noise(rows, -(-cols // _SIDE))
    return x


def _neighbours(chunks: int, coefficients: int) -> Tensor:
    """Return states whose largest are hard to find: threads' maxima tell 31 of them, and 496 differ in last bits."""
    of_thread = torch.arange(coefficients) % _SIDE
    large = (of_thread < 8) & ~((of_thread == 7) & (torch.arange(coefficients) // _SIDE % 4 == 3))
    states = torch.full((coefficients,), 2.0**-100)
    states[large] = 1.0 + torch.arange(int(large.sum())) * 2.0**-22
    return states.expand(chunks, coefficients).contiguous()


@dataclass(frozen=True)
class Case:
    """A bucket to count.

    Args:
        name: of the table's line.
        draw: the tensor, by rows and columns.
        senders: how many payloads are decoded.
        verbs: which of them are shown.
        shape: the tensor's.
        dtype: the tensor's.
        compressor: what is sent.
        average: what is decoded.
        epilogue: what decoding does with the average.
        draw_state: what was not sent before, by chunks and coefficients.

    """

    name: str
    draw: Callable[[int, int], Tensor] = _noise
    senders: int = 2
    verbs: tuple[str, ...] = _USUAL
    shape: tuple[int, int] = (3 * _SIDE, 4 * _SIDE)
    dtype: torch.dtype = torch.float32
    compressor: Compressor = _BF16_VALUES
    average: Average = "nodes"
    epilogue: Epilogue = _SIGN_STEP
    draw_state: Callable[[int, int], Tensor] = torch.zeros


CASES = (
    Case("white noise, 2 nodes, sign step"),
    Case("8 nodes", senders=8, verbs=("verify", "decode")),
    Case("32 nodes", senders=32, verbs=("verify", "decode")),
    Case("by contributors", average="contributors", verbs=_DECODE),
    Case("sign values", compressor=demo(k=32, chunk=_SIDE, values="sign")),
    Case("bf16", dtype=torch.bfloat16, verbs=("encode", "decode")),
    Case("fp16", dtype=torch.float16, verbs=("encode", "decode")),
    Case("plain step", epilogue=Epilogue("plain_step", keep=0.999), verbs=_DECODE),
    Case("ragged 100 x 90", shape=(100, 90), verbs=("encode", "decode")),
    Case("rows not aligned", shape=(3 * _SIDE, 4 * _SIDE - 3), verbs=_DECODE),
    Case("falling spectrum", draw=_pink, verbs=_ENCODE),
    Case("one column of a chunk", draw=_one_column, verbs=_ENCODE),
    Case("zeros", draw=torch.zeros, verbs=_ENCODE),
    Case("constant", draw=torch.ones, verbs=_ENCODE),
    Case("neighbours: constructed worst", draw=torch.zeros, draw_state=_neighbours, verbs=_ENCODE),
)
_FLAT, _BOTH = (1, 3 * _SIDE * _SIDE), ("encode", "decode")
FLAT_CASES = (
    Case("flat, 4 of 64 coefficients", shape=_FLAT, compressor=demo(k=4, chunk=_SIDE), verbs=_BOTH),
    Case("flat, top-k 1/32", shape=_FLAT, compressor=top_k(1 / 32), verbs=_BOTH),
    Case("flat, striding 1/32", shape=_FLAT, compressor=striding(1 / 32), verbs=_BOTH),
    Case("flat, dense, sign and two bits", shape=_FLAT, compressor=dense(values="sign2"), verbs=_BOTH),
)
"""Chunks of one row, which no kernel has in registers."""
"""The first one is what a step usually does; the others what costs more, or must not."""


class Measured(NamedTuple):
    """Launches of each verb, and what they worked on; ``needed_nbytes`` no kernel could do without."""

    launches: Mapping[str, list[Launch]]
    needed_nbytes: Mapping[str, int]
    chunks: float
    numel: int


def run_case(case: Case, launcher: CountingLauncher) -> Measured:
    """Run a case's verbs on the host, and require what they leave to have the bits of the reference."""
    kernels = GpuKernels(launcher)
    tensor = case.draw(*case.shape).to(case.dtype)
    plan = plan_buffer([TensorSpec("x", case.shape, case.dtype)], case.compressor)
    x, state = _aligned(tensor), _aligned(case.draw_state(*plan.plans[0].state_shape))
    expected_state = state.clone()
    words, expected = (_aligned(torch.zeros(case.senders, plan.nwords, dtype=torch.int32)) for _ in range(2))
    launches = {verb: list[Launch]() for verb in VERBS}

    def run(verb: str, work: Callable[[], SupportsInt | None]) -> None:
        launcher.launches = launches[verb]
        status = work()
        if status is not None and int(status):
            raise AssertionError(f"{verb} of {case.name} left the status {int(status)}.")

    encoder = kernels.encoder(plan, words[0])
    reference = _REFERENCE.encoder(plan, expected[0])
    run("encode", lambda: encoder.encode_([x], [state], [state], _UPDATE, step=0, sequence=0))
    reference.encode_([tensor], [expected_state], [expected_state], _UPDATE, step=0, sequence=0)
    expected[1:] = expected[0]
    words[1:] = words[0]
    _require_equal(case, "encode", (words, expected), (state, expected_state))
    if "rollback" in case.verbs:
        run("rollback", lambda: encoder.rollback_([x], [state], _UPDATE, step=0))
        reference.rollback_([tensor], [expected_state], _UPDATE, step=0)
        _require_equal(case, "rollback", (state, expected_state))
    regions = [Region(f"node {number}", number * plan.nwords, plan.nwords) for number in range(case.senders)]
    decoder, decoder_by_reference = (one.decoder(plan, words.view(-1), regions) for one in (kernels, _REFERENCE))
    run("verify", lambda: decoder.verify(step=0, sequence=0))
    decoder_by_reference.verify(step=0, sequence=0)
    run("decode", lambda: decoder.decode_([x], step=0, average=case.average, epilogue=case.epilogue))
    decoder_by_reference.decode_([tensor], step=0, average=case.average, epilogue=case.epilogue)
    _require_equal(case, "decode", (x, tensor))
    if "mix" in case.verbs:
        run("mix", lambda: kernels.mix_(x, 0.5, [tensor], [0.5], x) and None)
    payloads, tensor_nbytes = case.senders * plan.nbytes, x.numel() * x.itemsize
    needed_nbytes = {
        "encode": tensor_nbytes + 2 * state.nbytes + plan.nbytes,
        "verify": payloads,
        "decode": (1 if case.epilogue.kind == "store" else 2) * tensor_nbytes + payloads,
        "rollback": tensor_nbytes + 2 * state.nbytes + plan.nbytes,
        "mix": 3 * tensor_nbytes,
    }
    return Measured(launches, needed_nbytes, state.numel() / _SIDE**2, x.numel())


def _aligned(tensor: Tensor) -> Tensor:
    """Return a copy that begins where an allocation on a device may begin."""
    octets = torch.zeros(tensor.nbytes + _ALLOCATION, dtype=torch.uint8)
    first = -octets.data_ptr() % _ALLOCATION
    return octets[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _require_equal(case: Case, verb: str, *pairs: tuple[Tensor, Tensor]) -> None:
    for got, expected in pairs:
        if not torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)):
            raise AssertionError(
                f"{verb} of {case.name} differs from the reference: the counts are those of a mistake."
            )
