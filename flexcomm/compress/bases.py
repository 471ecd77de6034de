"""Bases: the coordinates in which a tensor is thinned out. Both cut it into chunks; zeros fill the last ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from flexcomm.compress.settings import Settings, rule

__all__ = ["Basis", "Cut", "Dct", "Identity"]

# Kernels work on whole chunks, in memory of their own for each thread: up to 50 bytes for each coefficient.
_LARGEST_FLAT_CHUNK = 1 << 16
_LARGEST_DCT_CHUNK = 1024
# The transform halves a length while it is even; what is left over is a dense product, of as many steps as its square.
_LARGEST_ODD_PART = 127


class Cut(NamedTuple):
    """A tensor as a matrix of ``[rows, cols]``, and the shape of its chunks."""

    rows: int
    cols: int
    chunk_rows: int
    chunk_cols: int

    @property
    def chunk_numel(self) -> int:
        """Coefficients of one chunk."""
        return self.chunk_rows * self.chunk_cols

    @property
    def chunks(self) -> int:
        """How many chunks that makes."""
        return -(-self.rows // self.chunk_rows) * -(-self.cols // self.chunk_cols)


@dataclass(frozen=True)
class Basis(Settings, ABC):
    """Coordinates of a tensor, cut into chunks; a base for frozen dataclasses."""

    transformed: ClassVar[bool]

    @abstractmethod
    def most_in_a_chunk(self) -> int:
        """Return how many coefficients a chunk holds at most."""

    @abstractmethod
    def cut(self, shape: tuple[int, ...]) -> Cut:
        """Return how a tensor of this shape is cut into chunks."""


_FLAT_CHUNK = rule(
    int, f"a whole number from 2 to {_LARGEST_FLAT_CHUNK}", lambda chunk: 2 <= chunk <= _LARGEST_FLAT_CHUNK
)
_DCT_CHUNK = rule(
    int,
    f"a whole number from 2 to {_LARGEST_DCT_CHUNK} without an odd divisor above {_LARGEST_ODD_PART} (powers of two "
    f"are fastest)",
    lambda chunk: 2 <= chunk <= _LARGEST_DCT_CHUNK and _odd_part(int(chunk)) <= _LARGEST_ODD_PART,
)


def _odd_part(length: int) -> int:
    return length // (length & -length)


@dataclass(frozen=True)
class Identity(Basis):
    """The elements themselves, flattened, in chunks of nearly equal length, none longer than ``chunk``."""

    chunk: int = field(default=4096, metadata=_FLAT_CHUNK)
    transformed = False

    def most_in_a_chunk(self) -> int:
        return self.chunk

    def cut(self, shape: tuple[int, ...]) -> Cut:
        numel = math.prod(shape)
        chunks = max(1, -(-numel // self.chunk))
        return Cut(1, numel, 1, max(1, -(-numel // chunks)))


@dataclass(frozen=True)
class Dct(Basis):
    """The orthonormal DCT-II of chunks of ``chunk x chunk``; of ``chunk``, if the tensor has fewer than two dims.

    Leading dims are folded into the rows. A dim that is shorter than the chunk is not padded to all of it, but to the
    next power of two. A matrix of one row or one column is treated as flat.
    """

    chunk: int = field(default=64, metadata=_DCT_CHUNK)
    transformed = True

    def most_in_a_chunk(self) -> int:
        return self.chunk * self.chunk

    def cut(self, shape: tuple[int, ...]) -> Cut:
        cols = shape[-1] if shape else 1
        rows = math.prod(shape[:-1])
        if min(rows, cols) <= 1:
            rows, cols = 1, rows * cols
        return Cut(rows, cols, self._side(rows), self._side(cols))

    def _side(self, length: int) -> int:
        return min(self.chunk, 1 << max(0, length - 1).bit_length())
