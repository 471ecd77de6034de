"""What is counted: buckets of one tensor, encoded, verified and decoded on the host by the kernels' real launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.count import Launch
from bench.gpu.cuda_on_host import CountingLauncher
from flexcomm import Compressor, Epilogue, TensorSpec, demo
from flexcomm.codec import plan_buffer
from flexcomm.kernels import Average, Region, StateUpdate
from flexcomm.kernels.gpu import GpuKernels

VERBS = ("encode", "verify", "decode")
_UPDATE = StateUpdate(decay=0.95)
_SIGN_STEP = Epilogue("sign_step", lr=1e-3, keep=0.999)
_SIDE = 64
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

    """

    name: str
    draw: Callable[[int, int], Tensor] = _noise
    senders: int = 2
    verbs: tuple[str, ...] = VERBS
    shape: tuple[int, int] = (3 * _SIDE, 4 * _SIDE)
    dtype: torch.dtype = torch.float32
    compressor: Compressor = _BF16_VALUES
    average: Average = "nodes"
    epilogue: Epilogue = _SIGN_STEP


_ENCODE, _DECODE = ("encode",), ("decode",)
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
)
"""The first one is what a step usually does; the others what costs more, or must not."""


class Measured(NamedTuple):
    """Launches of each verb, and what they worked on; ``needed_nbytes`` no kernel could do without."""

    launches: Mapping[str, list[Launch]]
    needed_nbytes: Mapping[str, int]
    chunks: int
    numel: int


def run_case(case: Case, launcher: CountingLauncher) -> Measured:
    """Run a case's verbs on the host."""
    kernels = GpuKernels(launcher)
    x = case.draw(*case.shape).to(case.dtype)
    plan = plan_buffer([TensorSpec("x", case.shape, case.dtype)], case.compressor)
    words = torch.zeros(case.senders, plan.nwords, dtype=torch.int32)
    launches: dict[str, list[Launch]] = {}
    for sender in words:
        state = torch.zeros(plan.plans[0].state_shape)
        launcher.counted = []
        int(kernels.encoder(plan, sender).encode_([x], [state], [state], _UPDATE, step=0, sequence=0))
        launches.setdefault("encode", launcher.counted)
    regions = [Region(f"node {number}", number * plan.nwords, plan.nwords) for number in range(case.senders)]
    decoder = kernels.decoder(plan, words.view(-1), regions)
    launcher.counted = []
    int(decoder.verify(step=0, sequence=0))
    launches["verify"], launcher.counted = launcher.counted, []
    decoder.decode_([x], step=0, average=case.average, epilogue=case.epilogue)
    launches["decode"] = launcher.counted
    payloads = case.senders * plan.nbytes
    needed_nbytes = {
        "encode": x.numel() * (x.itemsize + 2 * state.itemsize) + plan.nbytes,
        "verify": payloads,
        "decode": 2 * x.numel() * x.itemsize + payloads,
    }
    return Measured(launches, needed_nbytes, plan.plans[0].chunks, x.numel())
