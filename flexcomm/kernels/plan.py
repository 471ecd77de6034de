"""What kernels are told: the mathematics of one tensor (``TensorPlan``) and where its sections are (``Layout``).

Both are plain numbers. ``flexcomm.compress`` makes the first, ``flexcomm.codec.wire`` the second; kernels know neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from flexcomm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NO_DRAW", "Draw", "IndexCode", "Layout", "Selection", "TensorPlan", "ValueCode"]


class Selection(IntEnum):
    """Which coefficients of a chunk are sent."""

    EVERYTHING = 0
    LARGEST = 1
    """the ``keep`` of largest magnitude; of equals, those of lowest index"""
    ABOVE = 2
    """every one whose magnitude reaches ``tau``, of all chunks together at most ``keep``"""
    SHUFFLED = 3
    """``keep`` of each chunk, in an order all ranks shuffle alike"""
    STRIDED = 4
    """``keep`` of each chunk, evenly spaced, moving on by one every step"""


class ValueCode(IntEnum):
    """How a sent coefficient is written."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    INT8 = 3
    SIGN = 4
    SIGN2 = 5

    @property
    def bits(self) -> int:
        """Bits an entry takes."""
        return (32, 16, 16, 8, 1, 3)[self]

    @property
    def scales(self) -> int:
        """16-bit scales a chunk takes."""
        return (0, 0, 0, 1, 1, 2)[self]


class IndexCode(IntEnum):
    """How the indices of a chunk are written."""

    NONE = 0
    """not at all: they follow from the plan and the step"""
    PACKED = 1
    ELIAS_FANO = 2
    BITMAP = 3


@dataclass(frozen=True)
class TensorPlan:
    """A tensor seen as a ``[rows, cols]`` matrix, cut into chunks of ``[chunk_rows, chunk_cols]``, zeros at the rims.

    ``keep`` counts entries of each chunk; for ``Selection.ABOVE`` those of all chunks together. ``exact`` says that
    the payload is as long as what it holds, not as long as it may get.
    """

    rows: int
    cols: int
    chunk_rows: int
    chunk_cols: int
    transformed: bool
    selection: Selection
    keep: int
    values: ValueCode
    tau: float = 0.0
    seed: int = 0
    exact: bool = False

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
        if self.keep < 1 and self.chunks > 0:
            yield "keep is less than one"
        if self.keep > self.chunk_numel and not self.is_variable:
            yield "keep is more than a chunk holds"
        if self.selection is Selection.EVERYTHING and self.keep != self.chunk_numel:
            yield "keep is not everything"
        if not self.tau >= 0:
            yield "tau is negative"
        if self.exact and not self.is_variable:
            yield "only a variable selection can be exact"

    @cached_property
    def chunk_numel(self) -> int:
        """Coefficients of one chunk."""
        return self.chunk_rows * self.chunk_cols

    @cached_property
    def grid_rows(self) -> int:
        """Chunks one below the other."""
        return -(-self.rows // self.chunk_rows)

    @cached_property
    def grid_cols(self) -> int:
        """Chunks side by side."""
        return -(-self.cols // self.chunk_cols)

    @cached_property
    def chunks(self) -> int:
        """How many chunks the tensor is cut into."""
        return self.grid_rows * self.grid_cols

    @cached_property
    def state_shape(self) -> tuple[int, int]:
        """Shape of what is kept between steps: the coefficients not yet sent, as float32."""
        return self.chunks, self.chunk_numel

    @cached_property
    def is_variable(self) -> bool:
        """Whether the number of entries depends on the data."""
        return self.selection is Selection.ABOVE

    def scale(self, gain: float) -> float:
        """Return what the transform's results are multiplied by: it is orthonormal, its steps alone are not."""
        return gain / math.sqrt(self.chunk_numel) if self.transformed else gain

    @cached_property
    def entries(self) -> int:
        """How many entries a payload holds; for a variable one, at most."""
        return self.keep if self.is_variable else self.chunks * self.keep


@dataclass(frozen=True)
class Layout:
    """Where the sections of a payload begin, in 32-bit words from its start, and how its indices are written.

    Counts, if any, come first. The indices of a chunk begin at bit ``before * entry_bits + chunk * chunk_bits`` of
    their section, where ``before`` is the number of entries in the chunks before it; its values begin at bit
    ``before * values.bits`` of theirs.
    """

    code: IndexCode
    low_bits: int
    entry_bits: int
    chunk_bits: int
    indices: int
    scales: int
    values: int
    nwords: int

    @cached_property
    def coding(self) -> tuple[int, int, int, int]:
        """How indices are written, as plain numbers."""
        return int(self.code), self.low_bits, self.entry_bits, self.chunk_bits


class Draw(NamedTuple):
    """What shared selections depend on beside the plan: a key all ranks derive alike, and where in the order we are."""

    key: int
    start: int


NO_DRAW = Draw(0, 0)
