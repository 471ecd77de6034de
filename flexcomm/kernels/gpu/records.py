"""What kernels are given: the structures of ``codec.cu``, field by field. Addresses are integers."""

from __future__ import annotations

import ctypes

from torch import Tensor

WORD_NBYTES = 4


class Transform(ctypes.Structure):
    """A transform's program, on the device."""

    _fields_ = [(name, ctypes.c_int64) for name in ("height", "levels", "inputs", "outputs", "bounds", "steps")]


class Section(ctypes.Structure):
    """Where one sender's sections begin, how its indices are written, and where its entries before each chunk are."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("indices", "scales", "values", "code", "low_bits", "entry_bits", "chunk_bits", "before")
    ]


class Term(ctypes.Structure):
    """A vector to be mixed in, and its weight."""

    _fields_ = [("memory", ctypes.c_int64), ("weight", ctypes.c_double)]


class Job(ctypes.Structure):
    """What every kernel is given, by value."""

    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in (
                "rows", "cols", "chunk_rows", "chunk_cols", "grid_cols", "chunk_numel", "chunks",
                "transformed", "selection", "k", "tau_bits", "values", "value_bits", "scales", "count_bits",
                "key", "start", "element", "numel", "first", "senders", "by_contributors", "term_count",
                "group", "solo", "pitch", "pitch_down", "pitch_along", "turned_at", "marks_at", "ranks_at",
                "block_words",
            )
        ],
        ("decay", ctypes.c_float),
        ("factor", ctypes.c_float),
        ("stays", ctypes.c_float),
        ("padding", ctypes.c_float),
        ("down", Transform),
        ("along", Transform),
        ("own", Section),
        *[
            (name, ctypes.c_int64)
            for name in (
                "sections", "memory", "state", "next_state", "words", "counts", "answer", "workspace",
                "terms", "out", "distances",
            )
        ],
    ]  # fmt: skip

    def __init__(self, **fields: int | float) -> None:
        super().__init__(**fields)
        self._kept: list[Tensor] = []

    def point(self, **tensors: Tensor | None) -> None:
        """Set addresses, and keep what they lead to for as long as this job.

        Memory given back before the launch could be given out again for another part of the same launch.
        """
        for field, tensor in tensors.items():
            if tensor is not None:
                setattr(self, field, tensor.data_ptr())
                self._kept.append(tensor)
