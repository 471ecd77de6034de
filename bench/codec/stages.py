"""Where the time of encode and decode goes: the loops of the CPU's kernels, beside what the machine's memory allows.

Loops run one after the other on blocks that stay in cache. One loop alone would find its block in memory instead, so
prefixes are timed: encode without loops, with the first, with the first two. A stage is the difference of two medians,
and stages add up to the whole; a short one may come out below zero.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from bench.codec.codecs import CHUNK, DECAY
from bench.codec.speed import draw_gradient
from bench.errors import BenchError
from flexcomm import Compressor, Epilogue, TensorSpec, demo, random_k, striding, top_k
from flexcomm.codec import plan_buffer
from flexcomm.kernels import Region, StateUpdate, Status
from flexcomm.kernels.cpu.kernels import CpuDecoder, CpuEncoder, CpuKernels
from flexcomm.kernels.cpu.selection import picker_of
from flexcomm.kernels.layout import IndexCode

ALL = "all"
"""Stage of the rows that hold the whole of encode, or of verify and decode."""
ENCODE, DECODE = "encode", "verify and decode"
_ACCUMULATE, _VERIFY, _DECODE = "accumulate", "verify", "decode"
_REST_OF_ENCODE, _REST_OF_DECODE = "rest of encode", "rest of decode"
_ADD, _ADAMW = "x.add_(y)", "AdamW(fused=True)"
_ACCUMULATE_NBYTES = 12.0
"""Read a float of the tensor and one of the state, write one of the state."""
_STEP_NBYTES = 8.0
"""Read and write a parameter: of the lines of cache that a step touches."""
_TORCH_NBYTES = {_ADD: 12.0, _ADAMW: 28.0}
"""Three floats; parameter and two moments read and written, gradient read."""
_LINE_NUMEL = 16
"""Floats in a line of cache."""
_UPDATE = StateUpdate(DECAY, gain=1e-3)
_SIGN_STEP = Epilogue("sign_step", lr=1e-3)
_RATE = 1 / 32
_MATRICES: dict[str, Compressor] = {
    "demo(k=32)": demo(32, CHUNK),
    'demo(k=32, values="sign")': demo(32, CHUNK, values="sign"),
    "top_k(1/32)": top_k(_RATE),
    "random_k(1/32)": random_k(_RATE),
    "striding(1/32)": striding(_RATE),
}
_FLAT: dict[str, Compressor] = {"demo(k=4), flat": demo(4, CHUNK)}


@dataclass(frozen=True)
class StageTime:
    """Processor time of one stage, and the bytes of dense arrays that it has to read and write at least.

    Both are per element. What stays in cache is not counted: picks, payloads, the states of a block after accumulate.
    """

    recipe: str
    verb: str
    stage: str
    ns_per_element: float
    bytes_per_element: float

    @property
    def gb_per_s(self) -> float:
        return self.bytes_per_element / self.ns_per_element if self.ns_per_element > 0 else 0.0


def measure_stages(shapes: Sequence[tuple[int, int]], rounds: int) -> list[StageTime]:
    """Time the stages of several recipes on tensors of these shapes; the first rows are ``add_`` and AdamW of torch.

    Recipe by recipe, so that each finds its scratch memory again; torch's are timed in the rounds of every recipe.
    """
    numel = sum(rows * cols for rows, cols in shapes)
    gradient, param, other = draw_gradient((numel,), seed=0), torch.ones(numel), torch.ones(numel)
    gradients, params = _as_matrices(gradient, shapes), _as_matrices(param, shapes)
    of_torch = {_ADD: lambda: param.add_(gradient), _ADAMW: _adamw(gradients, params)}
    cases = [(recipe, compressor, gradients, params) for recipe, compressor in _MATRICES.items()]
    cases += [(recipe, compressor, [gradient], [param]) for recipe, compressor in _FLAT.items()]
    rows, times = [], []
    for case in cases:
        codec = StagedCodec(*case)
        spent_ns = _interleave({**of_torch, **codec.bodies}, other, rounds)
        times.append({name: spent / numel for name, spent in spent_ns.items()})
        rows += codec.split(times[-1])
    torch_ns = {name: median(ns[name] for ns in times) for name in of_torch}
    return [StageTime("torch", name, ALL, ns, _TORCH_NBYTES[name]) for name, ns in torch_ns.items()] + rows


def _interleave(bodies: Mapping[str, Callable[[], object]], other: Tensor, rounds: int) -> dict[str, float]:
    """Return the processor time of each body, in ns: medians over rounds, after one that does not count.

    Before each, ``other`` is written: none is to find in cache what the one before left there.
    """
    spent_ns: dict[str, list[int]] = {name: [] for name in bodies}
    for _ in range(rounds + 1):
        for name, body in bodies.items():
            other.add_(1.0)
            begin_ns = time.thread_time_ns()
            body()
            spent_ns[name].append(time.thread_time_ns() - begin_ns)
    return {name: median(times[1:]) for name, times in spent_ns.items()}


def _as_matrices(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    parts = torch.split(flat, [rows * cols for rows, cols in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _adamw(gradients: Sequence[Tensor], params: Sequence[Tensor]) -> Callable[[], object]:
    own = [nn.Parameter(param) for param in params]
    for param, gradient in zip(own, gradients, strict=True):
        param.grad = gradient
    return torch.optim.AdamW(own, lr=1e-3, fused=True).step


class StagedCodec:
    """A recipe's kernels with one sender. ``bodies``, in this order, are what is timed of it in a round."""

    def __init__(
        self, recipe: str, compressor: Compressor, tensors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        specs = [TensorSpec(str(number), tuple(x.shape), x.dtype) for number, x in enumerate(tensors)]
        self._plan = plan_buffer(specs, compressor)
        self._recipe, self._tensors, self._outputs = recipe, tensors, outputs
        self._states = [torch.empty(plan.state_shape).fill_(0.0) for plan in self._plan.plans]
        self._words = torch.empty(self._plan.nwords, dtype=torch.int32).fill_(0)
        self._encoders = self._make_encoders()
        self._decoders = self._make_decoders()
        # The last encoder and the last decoder run all loops: what is verified and decoded is a real payload.
        *_, encoder = self._encoders.values()
        *_, self._decoder = self._decoders.values()
        self._encode(encoder)
        self._verify()
        self._decoder.decode_(outputs, step=0, average="nodes")
        self._touched = touched_share(outputs)
        self.bodies: dict[str, Callable[[], object]] = {
            **{self._key(stage): partial(self._encode, one) for stage, one in self._encoders.items()},
            self._key(_VERIFY): self._verify,
            **{self._key(stage): partial(self._decode, one) for stage, one in self._decoders.items()},
        }

    def split(self, ns: Mapping[str, float]) -> list[StageTime]:
        """Return the stages of encode and of decode, each after the whole; ``ns`` are those of ``bodies``."""
        encode = _differences({stage: ns[self._key(stage)] for stage in self._encoders})
        decode = _differences({stage: ns[self._key(stage)] for stage in self._decoders})
        rows = []
        for verb, spent in ((ENCODE, encode), (DECODE, {_VERIFY: ns[self._key(_VERIFY)], **decode})):
            nbytes = {stage: self._dense_nbytes(stage) for stage in spent}
            rows.append(StageTime(self._recipe, verb, ALL, sum(spent.values()), sum(nbytes.values())))
            rows += [StageTime(self._recipe, verb, stage, spent[stage], nbytes[stage]) for stage in spent]
        return rows

    def _key(self, stage: str) -> str:
        return f"{self._recipe}: {stage}"

    def _make_encoders(self) -> dict[str, CpuEncoder]:
        """Return encoders that run growing prefixes of the loops, by the stage that comes last in each."""
        plan, sends_indices = self._plan.plans[0], self._plan.layouts[0].code is not IndexCode.NONE
        picked = ["pick"] if picker_of(plan) else []
        stages = [_REST_OF_ENCODE, _ACCUMULATE, *picked, *(["put indices"] if sends_indices else []), "put values"]
        encoders = {stage: CpuKernels().encoder(self._plan, self._words) for stage in stages}
        for count, encoder in enumerate(encoders.values()):
            if {len(loops) for loops in encoder.loops} != {len(stages) - 1}:
                raise BenchError(
                    f"{self._recipe}: encode has other loops than {', '.join(stages[1:])}: name them here."
                )
            encoder.loops = [loops[:count] for loops in encoder.loops]
        return encoders

    def _make_decoders(self) -> dict[str, CpuDecoder]:
        """Return decoders as encoders are; the loops before the last find values and shared indices."""
        is_drawn = self._plan.layouts[0].code is IndexCode.NONE
        stages = [_REST_OF_DECODE, "get values, pick" if is_drawn else "get values", _DECODE]
        region = Region("this node", 0, self._plan.nwords)
        decoders = {stage: CpuKernels().decoder(self._plan, self._words, [region]) for stage in stages}
        for decoder, end in zip(decoders.values(), (0, -1, None), strict=True):
            decoder.loops = [loops[:end] for loops in decoder.loops]
        return decoders

    def _encode(self, encoder: CpuEncoder) -> None:
        problem = encoder.encode_(self._tensors, self._states, self._states, _UPDATE, step=0, sequence=0)
        if problem:
            raise BenchError(
                f"{self._recipe}: encode found {Status.of(problem)}, so its times are not those of a step."
            )

    def _verify(self) -> None:
        problem = self._decoder.verify(step=0, sequence=0)
        if problem:
            raise BenchError(f"{self._recipe}: verify found {Status.of(problem)} in what was encoded here.")

    def _decode(self, decoder: CpuDecoder) -> None:
        decoder.decode_(self._outputs, step=0, average="nodes", epilogue=_SIGN_STEP)

    def _dense_nbytes(self, stage: str) -> float:
        return {_ACCUMULATE: _ACCUMULATE_NBYTES, _DECODE: _STEP_NBYTES * self._touched}.get(stage, 0.0)


def _differences(ns: Mapping[str, float]) -> dict[str, float]:
    """Return what each prefix takes beyond the one before; the first, which runs no loop, comes last."""
    first = next(iter(ns))
    return {**{stage: ns[stage] - ns[before] for before, stage in pairwise(ns)}, first: ns[first]}


def touched_share(decoded: Sequence[Tensor]) -> float:
    """Return the share of the lines of cache with an element that is not zero: a step has to touch them."""
    lines = torch.cat([x.reshape(-1, _LINE_NUMEL) for x in decoded])
    return float((lines != 0).any(dim=1).float().mean())
