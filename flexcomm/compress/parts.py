"""The parts of a pipeline: bases, which cut a tensor into chunks and transform them, and selectors of coefficients.

Both are settings: numbers of any kind become Python's own, so that equal ones compare, hash and print alike. What is no
number is left as it is, because a pipeline lists everything that is wrong with it at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import ClassVar, NamedTuple

import torch

from flexcomm.kernels import Selection

# Kernels work on whole chunks, in memory of their own for each thread: up to 50 bytes for each coefficient.
_LARGEST_FLAT_CHUNK = 1 << 16
_LARGEST_DCT_CHUNK = 1024
# The transform halves a length while it is even; what is left over is a dense product, of as many steps as its square.
_LARGEST_ODD_PART = 127


@dataclass(frozen=True)
class _Rule:
    """The numbers that a setting may be; ``needed`` says the same in words that follow "must be"."""

    kind: type[int] | type[float]
    needed: str
    allows: Callable[[float], bool]
    optional: bool = False

    def plain(self, value: object) -> object:
        """Return the number as the setting's kind; anything else as it is."""
        if isinstance(value, bool):
            return value
        if self.kind is int and isinstance(value, Integral):
            return int(value)
        if self.kind is float and isinstance(value, Real):
            with suppress(OverflowError):
                return float(value)
        return value

    def admits(self, value: object) -> bool:
        if value is None:
            return self.optional
        return type(value) is self.kind and self.allows(value)


@dataclass(frozen=True)
class Settings:
    """A base for frozen dataclasses whose fields each have a rule."""

    def __post_init__(self) -> None:
        for name, one in self._rules().items():
            object.__setattr__(self, name, one.plain(getattr(self, name)))

    def complaints(self) -> list[str]:
        """Return what is wrong, setting by setting."""
        return [
            f"{name} is {getattr(self, name)!r}, but must be {one.needed}"
            for name, one in self._rules().items()
            if not one.admits(getattr(self, name))
        ]

    def _rules(self) -> dict[str, _Rule]:
        return {field.name: field.metadata["rule"] for field in fields(self)}


def _rule(
    kind: type[int] | type[float], needed: str, allows: Callable[[float], bool], *, optional: bool = False
) -> Mapping[str, _Rule]:
    """Return a rule as a field's metadata."""
    return {"rule": _Rule(kind, needed, allows, optional)}


def _odd_part(length: int) -> int:
    return length // (length & -length)


_WHOLE = _rule(int, "a whole number", lambda _: True)
_POSITIVE = _rule(int, "a whole number, at least 1", lambda count: count >= 1)
_SHARE = _rule(float, "a number above 0 and at most 1", lambda share: 0 < share <= 1)
_CAPACITY = _rule(float, "a number above 0 and at most 1, or None", lambda share: 0 < share <= 1, optional=True)
_TAU = _rule(
    float,
    "positive and finite as a float32: a number from 1.5e-45 to 3.4e+38",
    lambda tau: 0 < float(torch.tensor(tau, dtype=torch.float32)) < math.inf,
)
_FLAT_CHUNK = _rule(
    int, f"a whole number from 2 to {_LARGEST_FLAT_CHUNK}", lambda chunk: 2 <= chunk <= _LARGEST_FLAT_CHUNK
)
_DCT_CHUNK = _rule(
    int,
    f"a whole number from 2 to {_LARGEST_DCT_CHUNK} without an odd divisor above {_LARGEST_ODD_PART} (powers of two "
    f"are fastest)",
    lambda chunk: 2 <= chunk <= _LARGEST_DCT_CHUNK and _odd_part(int(chunk)) <= _LARGEST_ODD_PART,
)


class Cut(NamedTuple):
    """A tensor as a matrix of ``[rows, cols]``, and the shape of its chunks."""

    rows: int
    cols: int
    chunk_rows: int
    chunk_cols: int

    @property
    def chunk_numel(self) -> int:
        """The number of coefficients of one chunk."""
        return self.chunk_rows * self.chunk_cols

    @property
    def chunks(self) -> int:
        """The number of chunks."""
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


@dataclass(frozen=True)
class Selector(Settings, ABC):
    """Settings that say which coefficients of a chunk are sent; a base for frozen dataclasses.

    Attributes:
        selection: how the kernels select.
        tau, seed, variable_length: what the plan's fields of the same names are; settings of those that have them.

    """

    selection: ClassVar[Selection]
    tau = 0.0
    seed = 0

    @property
    def variable_length(self) -> bool:
        return False

    @abstractmethod
    def choose_k(self, cut: Cut) -> int:
        """Return the plan's ``k`` for a tensor that is cut like this."""


@dataclass(frozen=True)
class Everything(Selector):
    """All coefficients."""

    selection = Selection.EVERYTHING

    def choose_k(self, cut: Cut) -> int:
        return cut.chunk_numel


@dataclass(frozen=True)
class TopK(Selector):
    """The ``k`` of largest magnitude of every chunk, or all of a chunk that holds fewer; of equals, the first."""

    k: int = field(metadata=_POSITIVE)
    selection = Selection.TOP_K

    def choose_k(self, cut: Cut) -> int:
        return min(self.k, cut.chunk_numel)


@dataclass(frozen=True)
class _Rated(Selector):
    """A base for selectors of a share of every chunk: the nearest number, at least one."""

    rate: float = field(metadata=_SHARE)

    def choose_k(self, cut: Cut) -> int:
        return _share(self.rate, cut.chunk_numel)


@dataclass(frozen=True)
class TopRate(_Rated):
    """The share ``rate`` of every chunk that is of largest magnitude, at least one; of equals, the first."""

    selection = Selection.TOP_K


@dataclass(frozen=True)
class RandomK(_Rated):
    """A random share ``rate`` of every chunk, the same on every rank, without indices on the wire.

    Every coefficient is sent once before any is sent twice, in an order that follows from the seed, the tensor's name
    and the round.
    """

    seed: int = field(default=0, metadata=_WHOLE)
    selection = Selection.RANDOM_K


@dataclass(frozen=True)
class Striding(_Rated):
    """Evenly spaced coefficients, the share ``rate`` of every chunk, moving on by one with every step.

    Gaps are never longer than one over the rate, rounded up, so every coefficient is sent within so many steps.
    """

    selection = Selection.STRIDING


@dataclass(frozen=True)
class Threshold(Selector):
    """Every coefficient whose magnitude reaches ``tau``: as many as there are.

    At most the share ``capacity`` of the tensor is sent: if more reach ``tau``, the largest are, of those about as
    large the first, and the rest stays behind. Payloads are then equally long and need no exchange of lengths.
    ``None``: all are sent, whatever it takes.
    """

    tau: float = field(metadata=_TAU)
    capacity: float | None = field(default=1 / 16, metadata=_CAPACITY)
    selection = Selection.THRESHOLD

    @property
    def variable_length(self) -> bool:
        return self.capacity is None

    def choose_k(self, cut: Cut) -> int:
        whole = cut.chunks * cut.chunk_numel
        return whole if self.capacity is None else _share(self.capacity, whole)


def _share(rate: float, count: int) -> int:
    """Return how many of ``count`` a rate means: the nearest number, and never none."""
    return max(1, round(rate * count))
