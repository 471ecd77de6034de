"""What the CPU's loops hand to each other. numba takes named tuples of numbers and arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Bytes, Doubles, Float, Floats, FullWords, Halves, Ints, Longs

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "Coding",
    "Job",
    "Memory",
    "Scratch",
    "Source",
    "Target",
    "Tiles",
    "Transform",
    "Words",
]

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = range(4)
"""What a tensor holds."""


class Job(NamedTuple):
    """A plan and a sample key, as numbers the loops can take."""

    rows: int
    cols: int
    chunk_rows: int
    chunk_cols: int
    grid_cols: int
    chunk_numel: int
    transformed: int
    selection: int
    needs_magnitudes: int
    is_variable: int
    k: int
    tau_bits: int
    values: int
    value_bits: int
    scales: int
    nonfinite_mask: int
    key: int
    start: int


class Coding(NamedTuple):
    """How a payload's indices are written; see :class:`flexcomm.kernels.plan.Layout`."""

    code: int
    low_bits: int
    entry_bits: int
    chunk_bits: int


class Transform(NamedTuple):
    """A :class:`butterflies.Program`, as arrays the loops can take."""

    height: int
    inputs: Ints
    outputs: Ints
    steps: Ints
    factors: Floats


class Memory(NamedTuple):
    """A tensor's elements, in the one array that fits their kind; the others are empty.

    One type for all dtypes: numba would compile every loop anew for each.
    """

    kind: int
    floats: Floats
    doubles: Doubles
    halves: Halves


class Source(NamedTuple):
    """What is encoded: a tensor's memory, what joins it, and the lists that transform a chunk's columns and rows.

    ``stays`` is the share of what is sent that is not taken out of the state.
    """

    memory: Memory
    state: Floats
    decay: Float
    factor: Float
    stays: Float
    down: Transform
    along: Transform


class Words(NamedTuple):
    """Memory seen in three ways. Making such views inside the loops would cost more than what they do to a chunk."""

    full: FullWords
    halves: Halves
    bytes: Bytes


class Target(NamedTuple):
    """Where a payload goes. Positions in the index and value words are relative to the origins, given in bits."""

    indices: FullWords
    index_origin: int
    scales: Halves
    values: Words
    value_origin: int


class Tiles(NamedTuple):
    """Memory for the chunks worked on: ``coefs[lanes, chunk_numel]``, their magnitudes, and two for the transform."""

    coefs: Floats
    magnitudes: Ints
    work: Floats
    turned: Floats


class Scratch(NamedTuple):
    """Memory for selection and values: ``picks`` and ``taken`` of all lanes, the rest of one chunk.

    Picks are places in the rows of all lanes, one behind the other.
    """

    picks: Ints
    taken: Floats
    counts: Longs
    tops: Ints
    few: Ints
    sums: Floats
