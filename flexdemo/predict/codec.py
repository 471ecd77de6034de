"""What compression costs, from a few measured calls; and what is supposed where nothing was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flexdemo.runtime import Compression

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SUPPOSED", "Call", "Decoding", "fit_codec", "fit_decoding", "for_k"]

SUPPOSED = Compression(
    k=32,
    chunk=64,
    bits_per_coefficient=25.0,
    encode_s_per_element=3e-9,
    decode_s_per_element=1.5e-9,
    decode_s_per_coefficient=5e-8,
)
"""About what one core of a 2-core cloud machine takes; accelerators take far less."""

_INDEX_BITS = 9
_AVERAGE_VALUE_BITS = 32


@dataclass(frozen=True)
class Call:
    """One exchange with ``demo(k, chunk)`` of ``elements`` on a rank, among ``nodes``."""

    k: int
    chunk: int
    elements: int
    nodes: int
    payload_nbytes: float
    encode_s: float
    decode_s: float

    @property
    def kept(self) -> float:
        return self.elements * self.k / self.chunk**2


def fit_codec(calls: Sequence[Call]) -> tuple[Compression, ...]:
    """Return the costs of each k; decoding is split into that of elements and that of coefficients received.

    The split needs calls that differ in k; of one k alone everything counts as elements'.
    """
    per_element_s, per_kept_s = _split_decoding(calls)
    return tuple(
        Compression(
            k=call.k,
            chunk=call.chunk,
            bits_per_coefficient=8 * call.payload_nbytes / call.kept,
            encode_s_per_element=call.encode_s / call.elements,
            decode_s_per_element=per_element_s,
            decode_s_per_coefficient=per_kept_s,
            averaged_bits_per_coefficient=_INDEX_BITS + _AVERAGE_VALUE_BITS,
        )
        for call in calls
    )


@dataclass(frozen=True)
class Decoding:
    """Encoding of ``elements`` by ``demo(k, chunk)``, and decoding of few and of many payloads: (how many, seconds)."""

    k: int
    chunk: int
    elements: int
    payload_nbytes: int
    encode_s: float
    few: tuple[int, float]
    many: tuple[int, float]


def fit_decoding(measured: Decoding) -> Compression:
    """Return the costs: what more payloads take belongs to their coefficients, the rest to the elements."""
    kept = measured.elements * measured.k / measured.chunk**2
    (few, few_s), (many, many_s) = measured.few, measured.many
    per_kept_s = max((many_s - few_s) / (many - few) / kept, 0.0)
    return Compression(
        k=measured.k,
        chunk=measured.chunk,
        bits_per_coefficient=8 * measured.payload_nbytes / kept,
        encode_s_per_element=measured.encode_s / measured.elements,
        decode_s_per_element=max(few_s - few * kept * per_kept_s, 0.0) / measured.elements,
        decode_s_per_coefficient=per_kept_s,
        averaged_bits_per_coefficient=_INDEX_BITS + _AVERAGE_VALUE_BITS,
    )


def for_k(codec: Sequence[Compression], k: int) -> Compression:
    """Return the costs at ``k``: those of the nearest k that is known, by ratio."""
    nearest = min(codec or (SUPPOSED,), key=lambda one: abs(math.log(one.k / max(k, 1))))
    return replace(nearest, k=k)


def _split_decoding(calls: Sequence[Call]) -> tuple[float, float]:
    """Return seconds per element and per coefficient, by a line through (coefficients, seconds), both per element."""
    xs = [call.kept * call.nodes / call.elements for call in calls]
    ys = [call.decode_s / call.elements for call in calls]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return max(mean_y - slope * mean_x, 0.0), slope
