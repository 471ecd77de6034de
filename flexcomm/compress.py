"""Compressors: which part of a tensor is sent, and how its values are written.

First the Protocol and Pipeline, then recipes, which are pipelines by name, and the parts of pipelines: bases and
selectors. All of them are settings: no tensor, no rank.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import ClassVar, Protocol, cast, get_args

import torch

from flexcomm.errors import CompressorError
from flexcomm.kernels import Selection, TensorPlan, ValueCode
from flexcomm.kernels import TensorSpec as TensorSpec
from flexcomm.kernels import ValueName as ValueName

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of tensors that can be compressed


class Compressor(Protocol):
    """Plans what is sent of a tensor; the kernels do what the plan says.

    A compressor is a value: it compares and hashes by its settings, and prints them, because ranks compare what they
    print. :func:`flexcomm.testing.check_compressor` holds one to the laws.
    """

    def plan(self, tensor: TensorSpec) -> TensorPlan:
        """Return what is sent of the tensor; the same for the same tensor, always."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Pipeline:
    """A compressor: a basis, a selector and a value code, one after the other. The recipes are pipelines.

    Args:
        basis: cuts a tensor into chunks and transforms them: ``Dct`` or ``Identity``.
        selector: selects coefficients of a chunk.
        values: how they are written.

    """

    basis: Basis
    selector: Selector
    values: ValueName = "bf16"

    def __post_init__(self) -> None:
        wrong = []
        for name, part, kinds in (("basis", self.basis, Basis), ("selector", self.selector, Selector)):
            needed = ", ".join(kind.__name__ for kind in get_args(kinds))
            is_one = isinstance(part, kinds)
            wrong += part.complaints() if is_one else [f"{name} is {part!r}, but must be one of {needed}"]
        if not wrong and isinstance(self.selector, TopK):
            most = math.prod(self.basis.cut((self.basis.chunk, self.basis.chunk))[2:])
            if self.selector.k > most:
                wrong.append(f"k is {self.selector.k}, but a chunk of {self.basis} holds no more than {most}")
        if self.values not in get_args(ValueName):
            wrong.append(f"values is {self.values!r}, but must be one of {', '.join(get_args(ValueName))}")
        if wrong:
            raise CompressorError(f"this compressor cannot be: {'; '.join(wrong)}.")

    def plan(self, tensor: TensorSpec) -> TensorPlan:
        """Return what is sent of the tensor."""
        if tensor.dtype not in DTYPES:
            needed = f"only {', '.join(map(str, DTYPES))} can be compressed: convert it, or leave it out."
            raise CompressorError(f"{tensor.name!r} is {tensor.dtype}, but {needed}")
        values = ValueCode.of(tensor.dtype) if self.values == "native" else ValueCode[self.values.upper()]
        cut = self.basis.cut(tensor.shape)
        whole = TensorPlan(*cut, self.basis.transformed, Selection.EVERYTHING, math.prod(cut[2:]), values)
        return self.selector.select(whole)


def demo(k: int = 32, chunk: int = 64, values: ValueName = "bf16") -> Pipeline:
    """Send the ``k`` fastest-moving components of every chunk of ``chunk x chunk``: DeMo's rule.

    Args:
        k: components sent of each chunk.
        chunk: the side of a chunk; the chunks of a flat tensor hold ``chunk`` elements.
        values: how a value is written: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"sign"``, ``"sign2"`` (three
            bits), or ``"native"``, as the tensor's own dtype is.

    Example:
        >>> import flexcomm
        >>> flexcomm.demo(k=32)
        Pipeline(basis=Dct(chunk=64), selector=TopK(k=32), values='bf16')

    """
    return Pipeline(Dct(chunk), TopK(k), values)


def top_k(rate: float, values: ValueName = "bf16") -> Pipeline:
    """Send the share ``rate`` of largest magnitude.

    Args:
        rate: the share of elements that is sent, above 0, at most 1.
        values: how a value is written, as for :func:`demo`.

    Example:
        >>> import flexcomm
        >>> flexcomm.top_k(1 / 32)
        Pipeline(basis=Identity(chunk=4096), selector=TopRate(rate=0.03125), values='bf16')

    """
    return Pipeline(Identity(), TopRate(rate), values)


def threshold(tau: float, capacity: float | None = 1 / 16, values: ValueName = "bf16") -> Pipeline:
    """Send every element whose magnitude reaches ``tau``.

    Args:
        tau: the least magnitude that is sent.
        capacity: the largest share of elements that is sent; None: without limit, and nodes exchange lengths first.
        values: how a value is written, as for :func:`demo`.

    Example:
        >>> import flexcomm
        >>> flexcomm.threshold(0.1)
        Pipeline(basis=Identity(chunk=4096), selector=Threshold(tau=0.1, capacity=0.0625), values='bf16')

    """
    return Pipeline(Identity(), Threshold(tau, capacity), values)


def random_k(rate: float, seed: int = 0, values: ValueName = "bf16") -> Pipeline:
    """Send a random share, the same on every rank: no indices travel, and it scales to many nodes.

    Args:
        rate: the share of elements that is sent in a step.
        seed: of the random order, which also depends on the step and the tensor's name.
        values: how a value is written, as for :func:`demo`.

    Example:
        >>> import flexcomm
        >>> flexcomm.random_k(1 / 32, seed=3)
        Pipeline(basis=Identity(chunk=4096), selector=RandomK(rate=0.03125, seed=3), values='bf16')

    """
    return Pipeline(Identity(), RandomK(rate, seed), values)


def striding(rate: float, values: ValueName = "bf16") -> Pipeline:
    """Send evenly spaced elements, moving on by one with every step; no indices travel.

    Args:
        rate: the share of elements that is sent in a step.
        values: how a value is written, as for :func:`demo`.

    Example:
        >>> import flexcomm
        >>> flexcomm.striding(1 / 32)
        Pipeline(basis=Identity(chunk=4096), selector=Striding(rate=0.03125), values='bf16')

    """
    return Pipeline(Identity(), Striding(rate), values)


def sign(values: ValueName = "sign") -> Pipeline:
    """Send every element's sign, and one magnitude for every chunk.

    Args:
        values: ``"sign"``, or ``"sign2"``, which adds two bits of magnitude to each sign.

    Example:
        >>> import flexcomm
        >>> flexcomm.sign()
        Pipeline(basis=Identity(chunk=4096), selector=Everything(), values='sign')

    """
    return Pipeline(Identity(), Everything(), values)


def dense(dtype: torch.dtype | None = None, values: ValueName = "native") -> Pipeline:
    """Send everything.

    Args:
        dtype: how values are written, even if it is wider than the tensor's dtype; None: as ``values`` says.
        values: how a value is written, as for :func:`demo`.

    Example:
        >>> import flexcomm
        >>> flexcomm.dense(values="sign2")
        Pipeline(basis=Identity(chunk=4096), selector=Everything(), values='sign2')

    """
    if dtype is None:
        return Pipeline(Identity(), Everything(), values)
    if dtype not in DTYPES or values != "native":
        raise CompressorError(
            f"dense cannot send as dtype={dtype!r} with values={values!r}: give one of {', '.join(map(str, DTYPES))} "
            f"as dtype, or values alone."
        )
    # A cast: the names of the codes are the members of ValueName, which a test holds.
    return Pipeline(Identity(), Everything(), cast("ValueName", ValueCode.of(dtype).name.lower()))


# The rules of settings: the kind of number, which of them are allowed, and the same in words that follow "must be".
_WHOLE = {"kind": int, "needed": "a whole number", "allows": lambda _: True}
_POSITIVE = {"kind": int, "needed": "a whole number, at least 1", "allows": lambda count: count >= 1}
_SHARE = {"kind": float, "needed": "a number above 0 and at most 1", "allows": lambda share: 0 < share <= 1}
_CAPACITY = _SHARE | {"needed": "a number above 0 and at most 1, or None", "optional": True}
_TAU = {
    "kind": float,
    "needed": "positive and finite as a float32: a number from 1.5e-45 to 3.4e+38",
    "allows": lambda tau: 0 < float(torch.tensor(tau, dtype=torch.float32)) < math.inf,
}
# Kernels work on whole chunks, in memory of their own for each thread: up to 50 bytes for each coefficient.
_FLAT_CHUNK = {"kind": int, "needed": "a whole number from 2 to 65536", "allows": lambda chunk: 2 <= chunk <= 65536}
# The transform halves a length while it is even; what is left over is a dense product, of as many steps as its square.
_DCT_CHUNK = {
    "kind": int,
    "needed": "a whole number from 2 to 1024 without an odd divisor above 127 (powers of two are fastest)",
    "allows": lambda chunk: 2 <= chunk <= 1024 and chunk // (chunk & -chunk) <= 127,
}


@dataclass(frozen=True)
class Settings:
    """A base for frozen dataclasses whose fields each have a rule as their metadata.

    Numbers of any kind become Python's own, so that equal settings compare, hash and print alike.
    """

    def __post_init__(self) -> None:
        for one in fields(self):
            value, kind = getattr(self, one.name), one.metadata["kind"]
            if type(value) is not bool and isinstance(value, Integral if kind is int else Real):
                with suppress(OverflowError):
                    object.__setattr__(self, one.name, kind(value))

    def complaints(self) -> list[str]:
        """Return what is wrong, setting by setting."""
        wrong = []
        for one in fields(self):
            value, rule = getattr(self, one.name), one.metadata
            allowed = type(value) is rule["kind"] and rule["allows"](value)
            if not allowed and not (value is None and "optional" in rule):
                wrong.append(f"{one.name} is {value!r}, but must be {rule['needed']}")
        return wrong


Cut = tuple[int, int, int, int]
"""A tensor seen as a matrix: its rows and columns, and those of its chunks."""


@dataclass(frozen=True)
class Identity(Settings):
    """The elements themselves, flattened, in chunks of nearly equal length, none longer than ``chunk``."""

    chunk: int = field(default=4096, metadata=_FLAT_CHUNK)
    transformed: ClassVar = False

    def cut(self, shape: tuple[int, ...]) -> Cut:
        numel = math.prod(shape)
        chunks = max(1, -(-numel // self.chunk))
        return 1, numel, 1, max(1, -(-numel // chunks))


@dataclass(frozen=True)
class Dct(Settings):
    """The orthonormal DCT-II of chunks of ``chunk x chunk``; of ``chunk``, if the tensor has fewer than two dims.

    Leading dims are folded into the rows; a dim shorter than the chunk is padded to the next power of two only. A
    matrix of one row or one column is treated as flat.
    """

    chunk: int = field(default=64, metadata=_DCT_CHUNK)
    transformed: ClassVar = True

    def cut(self, shape: tuple[int, ...]) -> Cut:
        cols = shape[-1] if shape else 1
        rows = math.prod(shape[:-1])
        if min(rows, cols) <= 1:
            rows, cols = 1, rows * cols
        chunk_rows, chunk_cols = (min(self.chunk, 1 << max(0, length - 1).bit_length()) for length in (rows, cols))
        return rows, cols, chunk_rows, chunk_cols


Basis = Identity | Dct
"""Coordinates of a tensor, cut into chunks."""


@dataclass(frozen=True)
class Everything(Settings):
    """All coefficients."""

    def select(self, whole: TensorPlan) -> TensorPlan:
        """Return the plan that sends this selection of what ``whole`` sends, which is everything."""
        return whole


@dataclass(frozen=True)
class TopK(Settings):
    """The ``k`` of largest magnitude of every chunk, or all of a chunk that holds fewer; of equals, the first."""

    k: int = field(metadata=_POSITIVE)

    def select(self, whole: TensorPlan) -> TensorPlan:
        return replace(whole, selection=Selection.TOP_K, k=min(self.k, whole.chunk_numel))


@dataclass(frozen=True)
class _Rated(Settings):
    """A base for selectors of a share of every chunk: the nearest number, at least one."""

    rate: float = field(metadata=_SHARE)
    selection: ClassVar[Selection]

    def select(self, whole: TensorPlan) -> TensorPlan:
        return replace(whole, selection=self.selection, k=max(1, round(self.rate * whole.chunk_numel)))


@dataclass(frozen=True)
class TopRate(_Rated):
    """The share ``rate`` of every chunk that is of largest magnitude, at least one; of equals, the first."""

    selection = Selection.TOP_K


@dataclass(frozen=True)
class RandomK(_Rated):
    """A random share ``rate`` of every chunk, the same on all ranks, each coefficient once before any is sent twice."""

    seed: int = field(default=0, metadata=_WHOLE)
    selection = Selection.RANDOM_K

    def select(self, whole: TensorPlan) -> TensorPlan:
        return replace(super().select(whole), seed=self.seed)


@dataclass(frozen=True)
class Striding(_Rated):
    """Evenly spaced coefficients, the share ``rate`` of every chunk, moving on by one with every step."""

    selection = Selection.STRIDING


@dataclass(frozen=True)
class Threshold(Settings):
    """Every coefficient whose magnitude reaches ``tau``, at most the share ``capacity`` of the tensor.

    If more reach it, the largest are sent, of those about as large the first. ``None``: all are sent, and lengths are
    exchanged first.
    """

    tau: float = field(metadata=_TAU)
    capacity: float | None = field(default=1 / 16, metadata=_CAPACITY)

    def select(self, whole: TensorPlan) -> TensorPlan:
        above = replace(whole, selection=Selection.THRESHOLD, k=whole.entries, tau=self.tau)
        if self.capacity is None:
            return replace(above, variable_length=True)
        return replace(above, k=max(1, round(self.capacity * whole.entries)))


Selector = Everything | TopK | TopRate | RandomK | Striding | Threshold
"""Which coefficients of a chunk are sent."""
