"""What is sent of one tensor, as plain numbers: ``TensorPlan``, which ``flexcomm.compress`` makes.

``Selection`` and ``ValueCode`` are tables: a row for each member holds all that the rest of the library needs to know
of it. Nothing outside the kernels asks which member it has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from flexcomm.errors import InvalidArgumentError


class TensorSpec(NamedTuple):
    """What a plan may depend on: the same on every rank.

    Args:
        name: what the tensor is called in residuals and messages.
        shape: its shape.
        dtype: its dtype.

    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class SampleKey(NamedTuple):
    """What shared selections depend on beside the plan: a key all ranks derive alike, and where in the order we are."""

    key: int
    start: int


NO_SAMPLE_KEY = SampleKey(0, 0)


def _striding_key(plan: TensorPlan, step: int, _name: str) -> SampleKey:
    return SampleKey(0, step % plan.chunk_numel)


def _random_k_key(plan: TensorPlan, step: int, name: str) -> SampleKey:
    """Go through a shuffled order from its beginning to its end, then shuffle anew."""
    order, turn = divmod(step, -(-plan.chunk_numel // plan.k))
    return SampleKey(_hash32((plan.seed, name, order)), turn * plan.k % plan.chunk_numel)


@lru_cache(maxsize=4096)
def _hash32(key: Hashable) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little")


@dataclass(frozen=True)
class SelectionRule:
    """The properties of a selection.

    Args:
        wire_name: what it is called in the text that digests are of. Part of the format: it never changes.
        sends_indices: it depends on the coefficients, so the payload says which ones it holds; else every rank derives
            the same ones from the plan and the sample key.
        variable_count: the number of entries depends on the data, and payloads begin with the counts of their chunks.
        has_independent_chunks: what is sent of a chunk depends on this chunk alone, so that a part of a tensor sends
            what the whole would: ``two_phase`` needs that.
        sample_key: the key of a step, as a function of plan, step and the tensor's name; None: it needs no key.

    """

    wire_name: str
    sends_indices: bool = False
    variable_count: bool = False
    has_independent_chunks: bool = False
    sample_key: Callable[[TensorPlan, int, str], SampleKey] | None = None


class Selection(IntEnum):
    """Which coefficients of a chunk are sent. Numbers are those of ``codec.cu`` and of the wire."""

    rule: SelectionRule

    def __new__(cls, number: int, rule: SelectionRule) -> Self:
        member = int.__new__(cls, number)
        member._value_, member.rule = number, rule
        return member

    EVERYTHING = 0, SelectionRule("EVERYTHING", has_independent_chunks=True)
    TOP_K = 1, SelectionRule("LARGEST", sends_indices=True, has_independent_chunks=True)
    """the ``k`` of largest magnitude; of equals, those of lowest index"""
    THRESHOLD = 2, SelectionRule("ABOVE", sends_indices=True, variable_count=True)
    """every one whose magnitude reaches ``tau``, of all chunks together at most ``k``"""
    RANDOM_K = 3, SelectionRule("SHUFFLED", sample_key=_random_k_key)
    """``k`` of each chunk, in an order all ranks shuffle alike"""
    STRIDING = 4, SelectionRule("STRIDED", sample_key=_striding_key)
    """``k`` of each chunk, evenly spaced, moving on by one every step"""


@dataclass(frozen=True)
class ValueFormat:
    """The properties of a value code.

    Args:
        bits: bits of an entry.
        scales: 16-bit scales of a chunk.
        sum_dtype: the dtype whose bits the entries are, so that ``reduce`` can add them; None: codes cannot be added.
        nonfinite_mask: the bits that are all set in an entry that is not finite; 0: every entry is finite.
        rounding: what writing a value rounds at most, as a share of its own magnitude, denormals aside; None: it
            depends on the rest of its chunk.
        chunk_rounding: the same as a share of the chunk's largest magnitude; None: no bound of use.
        magnitudes: how many magnitudes the entries of one chunk can have; None: as many as a float has.

    """

    bits: int
    scales: int = 0
    sum_dtype: torch.dtype | None = None
    nonfinite_mask: int = 0
    rounding: float | None = None
    chunk_rounding: float | None = None
    magnitudes: int | None = None


class ValueCode(IntEnum):
    """How a sent coefficient is written. Numbers are those of ``codec.cu``; digests hold the names too."""

    format: ValueFormat

    def __new__(cls, number: int, row: ValueFormat) -> Self:
        member = int.__new__(cls, number)
        member._value_, member.format = number, row
        return member

    FP32 = 0, ValueFormat(32, sum_dtype=torch.float32, nonfinite_mask=0x7F800000, rounding=2.0**-24)
    BF16 = 1, ValueFormat(16, sum_dtype=torch.bfloat16, nonfinite_mask=0x7F80, rounding=2.0**-8)
    FP16 = 2, ValueFormat(16, sum_dtype=torch.float16, nonfinite_mask=0x7C00, rounding=2.0**-11)
    INT8 = 3, ValueFormat(8, scales=1, chunk_rounding=1 / 253, magnitudes=128)
    SIGN = 4, ValueFormat(1, scales=1, magnitudes=1)
    SIGN2 = 5, ValueFormat(3, scales=2, magnitudes=4)

    @classmethod
    def of(cls, dtype: torch.dtype) -> ValueCode:
        """Return the code that writes a dtype as it is; float32, where there is none."""
        return next((code for code in cls if code.format.sum_dtype is dtype), cls.FP32)


ValueName = Literal["fp32", "bf16", "fp16", "int8", "sign", "sign2", "native"]
"""The codes by name. ``native``: as the tensor's own dtype is, float64 as float32."""


def check_implemented(
    kernels: str, plan: TensorPlan, selections: Iterable[Selection], codes: Iterable[ValueCode]
) -> None:
    """Raise ``InvalidArgumentError`` unless a kernel set has the plan's selection and value code."""
    for member, known in ((plan.selection, tuple(selections)), (plan.values, tuple(codes))):
        if member not in known:
            raise InvalidArgumentError(
                f"the {kernels} kernels have no {member!r}, only {', '.join(one.name for one in known)}: add it to "
                f"flexcomm/kernels/{kernels}/, or choose other kernels."
            )


@dataclass(frozen=True)
class TensorPlan:
    """A tensor seen as a ``[rows, cols]`` matrix, cut into chunks of ``[chunk_rows, chunk_cols]``, zeros at the rims.

    There are ``grid_rows * grid_cols`` chunks. ``k`` counts entries of each chunk; with a ``variable_count`` those of
    all chunks together. ``variable_length`` says that the payload is as long as what it holds, not as long as it may
    get.
    """

    rows: int
    cols: int
    chunk_rows: int
    chunk_cols: int
    transformed: bool
    selection: Selection
    k: int
    values: ValueCode
    tau: float = 0.0
    seed: int = 0
    variable_length: bool = False

    def __post_init__(self) -> None:
        wrong = list(self._complaints())
        if wrong:
            raise InvalidArgumentError(f"no kernels can carry out this plan: {'; '.join(wrong)}. It is {self}.")

    def _complaints(self) -> Iterator[str]:
        if min(self.rows, self.cols) < 0 or min(self.chunk_rows, self.chunk_cols) < 1:
            yield "a side is negative, or a chunk is empty"
        if self.rows > 1 and (not self.transformed or self.chunk_rows == 1):
            yield "only transformed chunks of several rows can be cut from a matrix; see it as one row"
        if self.rows == 1 and self.chunk_rows != 1:
            yield "chunks of a matrix of one row have one row"
        if self.k < 1 and self.chunks > 0:
            yield "k is less than one"
        if self.k > self.chunk_numel and not self.variable_count:
            yield "k is more than a chunk holds"
        if self.selection is Selection.EVERYTHING and self.k != self.chunk_numel:
            yield "k is not everything"
        if not self.tau >= 0:
            yield "tau is negative"
        if self.variable_length and not self.variable_count:
            yield "only payloads with a variable count can be of variable length"

    @cached_property
    def chunk_numel(self) -> int:
        return self.chunk_rows * self.chunk_cols

    @cached_property
    def grid_rows(self) -> int:
        return -(-self.rows // self.chunk_rows)

    @cached_property
    def grid_cols(self) -> int:
        return -(-self.cols // self.chunk_cols)

    @cached_property
    def chunks(self) -> int:
        return self.grid_rows * self.grid_cols

    @cached_property
    def state_shape(self) -> tuple[int, int]:
        """Shape of what is kept between steps: the coefficients not yet sent, as float32."""
        return self.chunks, self.chunk_numel

    @cached_property
    def variable_count(self) -> bool:
        """Whether the number of entries depends on the data."""
        return self.selection.rule.variable_count

    @cached_property
    def sends_everything(self) -> bool:
        """Whether every coefficient is sent, whatever the data."""
        return self.k == self.chunk_numel and not self.variable_count

    @cached_property
    def sends_indices(self) -> bool:
        """Whether payloads say which coefficients they hold; else every rank knows."""
        return self.selection.rule.sends_indices and not self.sends_everything

    def sending_everything(self, values: ValueCode) -> TensorPlan:
        """Return a plan that sends every coefficient, in the same coordinates."""
        k, chosen = self.chunk_numel, Selection.EVERYTHING
        return replace(self, selection=chosen, k=k, values=values, tau=0.0, seed=0, variable_length=False)

    def of_coefficients(self) -> TensorPlan:
        """Return a plan with the same payloads for a tensor whose elements are the coefficients."""
        chunks, numel = self.state_shape
        return replace(self, rows=1, cols=chunks * numel, chunk_rows=1, chunk_cols=numel, transformed=False)

    def scale(self, gain: float) -> float:
        """Return what the transform's results are multiplied by: it is orthonormal, its steps alone are not."""
        return gain / math.sqrt(self.chunk_numel) if self.transformed else gain

    def sample_key(self, step: int, name: str) -> SampleKey:
        """Return the key of a shared selection at this step: a function of (seed, step, name) and nothing else."""
        make_key = self.selection.rule.sample_key
        # numpy's integers print their type, and what is printed is hashed.
        return NO_SAMPLE_KEY if make_key is None else make_key(self, int(step), name)

    @cached_property
    def entries(self) -> int:
        """How many entries a payload holds; for a variable one, at most."""
        return self.k if self.variable_count else self.chunks * self.k


BIN_SHIFT = 16
"""Of a threshold's candidates, magnitudes are binned by the upper half of their bits."""
BINS = 1 << 15


@lru_cache(maxsize=256)
def threshold_bits(tau: float) -> int:
    """Return a threshold as the bits of a float32 without sign; one beyond all float32 is infinite."""
    return int(torch.tensor(tau, dtype=torch.float32).abs().view(torch.int32))


class ThresholdCounts(NamedTuple):
    """What a variable selection will send: entries of each chunk (int64), of those that reach the threshold.

    Where more of a chunk reach it than are counted, the last of the threshold's own bin stay. The threshold is given
    as the bits of a float32, which order magnitudes as their values do; a bin is what has the same upper 16 bits.
    """

    counts: Tensor
    tau_bits: int


def choose_threshold(
    plan: TensorPlan, count: Callable[[int], Tensor], count_bins: Callable[[], Tensor]
) -> ThresholdCounts:
    """Return what a variable plan sends.

    If more than ``plan.k`` reach its threshold, the threshold rises to the bin at which ``plan.k`` are exceeded; of
    that bin so many are sent as there is room for, those of the first chunks and lowest indices.

    Args:
        plan: has the threshold and ``k``.
        count: returns how many magnitudes of each chunk reach a bound, given by its bits.
        count_bins: returns how many magnitudes are in each bin; those up to the threshold's own need not be right.

    """
    tau_bits = threshold_bits(plan.tau)
    counts = count(tau_bits)
    if int(counts.sum()) <= plan.k:
        return ThresholdCounts(counts, tau_bits)
    first = (tau_bits >> BIN_SHIFT) + 1
    reaching = count_bins()[first:].flip(0).cumsum(0).flip(0)
    # At most k reach the end of the bin, which is above the threshold, and more than k the bin itself.
    bin_end = (first + int((reaching > plan.k).sum())) << BIN_SHIFT
    tau_bits = max(tau_bits, bin_end - (1 << BIN_SHIFT))
    above = count(bin_end)
    between, room = count(tau_bits) - above, plan.k - int(above.sum())
    counts = above + torch.minimum((room - entries_before(between)[:-1]).clamp(min=0), between)
    return ThresholdCounts(counts, tau_bits)


def entries_before(counts: Tensor) -> Tensor:
    """Return how many entries precede each chunk, and at the end, how many there are in all."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))
