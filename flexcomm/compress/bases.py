"""Bases: the coordinates in which a tensor is thinned out. Both cut it into chunks; zeros fill the last ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Cut", "Dct", "Identity"]

_LARGEST_FLAT_CHUNK = 1 << 20
_LARGEST_DCT_CHUNK = 1024


class Cut(NamedTuple):
    """A tensor as a matrix of ``[rows, cols]``, and the shape of its chunks."""

    rows: int
    cols: int
    chunk_rows: int
    chunk_cols: int

    @property
    def chunks(self) -> int:
        """How many chunks that makes."""
        return -(-self.rows // self.chunk_rows) * -(-self.cols // self.chunk_cols)


@dataclass(frozen=True)
class Identity:
    """The elements themselves, flattened, in chunks of nearly equal length, none longer than ``chunk``."""

    chunk: int = 4096
    transformed = False

    def complaints(self) -> list[str]:
        return _complaints(self.chunk, _LARGEST_FLAT_CHUNK)

    def most_in_a_chunk(self) -> int:
        return self.chunk

    def cut(self, shape: tuple[int, ...]) -> Cut:
        numel = math.prod(shape)
        chunks = max(1, -(-numel // self.chunk))
        return Cut(1, numel, 1, max(1, -(-numel // chunks)))


@dataclass(frozen=True)
class Dct:
    """The orthonormal DCT-II of chunks of ``chunk x chunk``; of ``chunk``, if the tensor has fewer than two dims.

    Leading dims are folded into the rows. A dim that is shorter than the chunk is not padded to all of it, but to the
    next power of two. A matrix of one row or one column is treated as flat.
    """

    chunk: int = 64
    transformed = True

    def complaints(self) -> list[str]:
        return _complaints(self.chunk, _LARGEST_DCT_CHUNK)

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


def _complaints(chunk: int, largest: int) -> list[str]:
    return [] if 2 <= chunk <= largest else [f"chunk is {chunk}, but must be from 2 to {largest}"]
