"""What launches are told: the structures of ``bucket.cuh``, and a bucket's tensors and blocks as tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcomm.device import to_device
from flexcomm.kernels.butterflies import plan_dct, plan_inverse_dct, plan_levels
from flexcomm.kernels.gpu.source import SIDE
from flexcomm.kernels.layout import HEADER_NWORDS, WORD_NBYTES, BufferPlan, Layout
from flexcomm.kernels.plan import Selection, TensorPlan, ValueCode, check_implemented, threshold_bits

THREADS = 64
"""Of a block: two warps, and a thread for each column of a chunk of 64 x 64."""
_SELECTIONS = (Selection.EVERYTHING, Selection.TOP_K, Selection.THRESHOLD, Selection.RANDOM_K, Selection.STRIDING)
_CODES = (ValueCode.FP32, ValueCode.BF16, ValueCode.FP16, ValueCode.INT8, ValueCode.SIGN, ValueCode.SIGN2)
"""Those of the enumerations of ``bits.cuh``, which has a branch for each."""
_SHORT = 128
"""Elements of a one-row chunk up to which a single thread does its selection, and a block does many side by side."""
_SUM_LANES = 32
_WORD_BITS = 32
_COUNTERS = 4 + 2 * THREADS
TILE_NBYTES = SIDE * (SIDE + 4) * WORD_NBYTES
_USUAL_NBYTES = 36 << 10
"""Shared memory up to which chunks lie side by side: several blocks fit a multiprocessor."""
_WORKSPACE_BLOCKS = 256
_WORKSPACE_WORDS = 1 << 26
"""Chunks too large for shared memory are worked on in global memory, so many at a time."""
_MOST_TILE_K = 1024
_MOST_TILE_IMAGE = 1148
"""Entries and words of a payload for which the shared memory of ``tiles.cuh`` has room."""
MOST_COUNTED_SENDERS = 255
"""Contributors that a byte can count."""

Record = NDArray[Any]


_U32, _U64, _I64, _F32, _F64 = np.uint32, np.uint64, np.int64, np.float32, np.float64


def _fields(*groups: tuple[Any, str]) -> np.dtype[Any]:
    return np.dtype([(name, kind) for kind, names in groups for name in names.split()], align=True)


# The structures of bucket.cuh and mixing.cuh, field by field. Addresses are integers.
TRANSFORM = _fields((_I64, "height levels"), (_U64, "inputs outputs bounds steps"))
SECTION = _fields(
    (_I64, "indices scales values"),
    (_U64, "before"),
    (_U32, "code low_bits entry_bits chunk_bits value_padding spare"),
)
TENSOR = _fields(
    (SECTION, "section"),
    (_I64, "rows cols"),
    (_U32, "chunk_rows chunk_cols grid_cols chunk_numel chunks"),
    (_U32, "transformed selection k values value_bits scales tau_bits variable count_bits"),
    (_U32, "is_tiled unit first_chunk first_counted number nwords variable_length"),
    (_U32, "group pitch pitch_down pitch_along turned_at marks_at ranks_at block_words stride"),
    (_F32, "scale"),
    (TRANSFORM, "down along inverse_down inverse_along"),
    (_U64, "workspace"),
)
OPERAND = _fields((_U64, "memory state next_state"), (_U32, "element key start"), (_F32, "factor"))
PLACE = _fields((_U32, "tensor chunk row col"))
JOB = _fields(
    (_U64, "places tensors operands sections starts words status tally refused open totals counts bins before placed"),
    (_U32, "tensor_count senders divisor blocks nwords used_words share place_count"),
    (_F32, "decay stays reciprocal"),
    (_U32, "is_exact is_variable_length variables counted is_recount"),
    (_F64, "lr keep"),
    (np.dtype((_U32, HEADER_NWORDS)), "header"),
)
TERM = _fields((_U64, "memory"), (_F64, "weight"))
MIX_JOB = _fields((_U64, "memory out distances terms"), (_I64, "numel"), (_U32, "element term_count"))


class BucketTables:
    """The tensors of a bucket and the blocks that work on them, on a device, made once.

    Args:
        layouts: where payloads are; those of ``plans``, what they are encoded from or decoded to.
        plans: of the tensors.
        device: where the tables are.
        shared_nbytes: the shared memory that a block may have.
        by_word: no two blocks write to one word of a buffer.
        tiled: chunks of 64 x 64 may be worked on in registers; not where lengths vary, for then payloads are elsewhere
            in every buffer, and only ``blocks.cuh`` looks them up.

    """

    def __init__(
        self,
        layouts: BufferPlan,
        plans: Sequence[TensorPlan],
        device: torch.device,
        shared_nbytes: int,
        *,
        by_word: bool,
        tiled: bool,
    ) -> None:
        self.is_tiled = [
            tiled and is_tileable(plan, layout) for plan, layout in zip(plans, layouts.layouts, strict=True)
        ]
        usual = TILE_NBYTES if any(self.is_tiled) else _USUAL_NBYTES
        self._held: list[Tensor] = []
        self.shared_nbytes = _COUNTERS * WORD_NBYTES
        self.has_shared_words = False
        records, places, blocks = np.zeros(max(1, len(plans)), TENSOR), [], 0
        counted = variables = 0
        firsts = list(accumulate((plan.chunks for plan in plans), initial=0))
        for number, (record, plan, layout) in enumerate(zip(records, plans, layouts.layouts, strict=False)):
            check_implemented("gpu", plan, _SELECTIONS, _CODES)
            _fill(record, plan, layout, layouts.positions[number], device)
            record["number"], record["first_chunk"], record["is_tiled"] = number, firsts[number], self.is_tiled[number]
            if plan.variable_count:
                variables += 1
                record["variable"], record["first_counted"] = variables, counted
                counted += plan.chunks
            whole = _aligned_chunks(plan, layout) if by_word else 1
            if self.is_tiled[number]:
                record["group"], record["unit"] = 1, whole
                self.has_shared_words = self.has_shared_words or whole > 1
                self.shared_nbytes = max(self.shared_nbytes, TILE_NBYTES)
                firsts_of_blocks = np.arange(0, plan.chunks)
            else:
                firsts_of_blocks = self._plan_blocks(record, plan, whole, usual, shared_nbytes, device)
            places.append(_places(number, plan, firsts_of_blocks))
            blocks += len(firsts_of_blocks)
        if not plans:
            records["group"] = records["unit"] = 1
        self.count, self.counted, self.variables, self.chunks = len(plans), counted, variables, firsts[-1]
        # A launch has at least one block: it may have a header to write.
        nothing = np.zeros(0 if blocks else 1, PLACE)
        self.places_by_tensor = places
        self.blocks = max(1, blocks)
        self.places = upload(np.concatenate([*places, nothing]), device)
        self.tensors = upload(records, device)

    def _plan_blocks(
        self, record: Any, plan: TensorPlan, whole: int, usual: int, most: int, device: torch.device
    ) -> NDArray[np.int64]:
        """Share out the chunks of a tensor; return the first chunk of each block."""
        # Of short chunks of one row, a block works on many side by side: alone, such a chunk would leave most threads
        # of a block waiting for each other. One thread does a whole chunk, so there are as many threads at least.
        group = 1 if plan.chunk_rows > 1 or plan.chunk_numel > _SHORT else THREADS
        areas = _plan_areas(plan, group)
        while group > 1 and (_COUNTERS + areas["block_words"]) * WORD_NBYTES > usual:
            group //= 2
            areas = _plan_areas(plan, group)
        for name, value in areas.items():
            record[name] = value
        unit, words = max(group, whole), areas["block_words"]
        record["unit"] = unit
        needed = (_COUNTERS + words) * WORD_NBYTES
        if needed <= most:
            self.shared_nbytes = max(self.shared_nbytes, needed)
            return np.arange(0, plan.chunks, unit)
        grid = min(-(-plan.chunks // unit), _WORKSPACE_BLOCKS, max(1, _WORKSPACE_WORDS // words))
        workspace = torch.empty(grid * words, dtype=torch.int32, device=device)
        self._held.append(workspace)
        record["workspace"] = workspace.data_ptr()
        record["stride"] = grid * unit
        return np.arange(grid) * unit


def is_tileable(plan: TensorPlan, layout: Layout) -> bool:
    """Return whether ``tiles.cuh`` can work on a tensor."""
    image = sum(-(-bits // _WORD_BITS) + 1 for bits in _chunk_bits(plan, layout))
    is_square = plan.transformed and plan.chunk_rows == plan.chunk_cols == SIDE
    chosen = plan.selection is Selection.TOP_K and plan.sends_indices
    return is_square and chosen and plan.k <= _MOST_TILE_K and image <= _MOST_TILE_IMAGE


def upload(records: Record, device: torch.device) -> Tensor:
    """Return records in a device's memory."""
    return to_device(torch.from_numpy(records.reshape(-1).view(np.uint8).copy()), device)


def _fill(record: Any, plan: TensorPlan, layout: Layout, position: int, device: torch.device) -> None:
    for name in ("rows", "cols", "chunk_rows", "chunk_cols", "grid_cols", "chunk_numel", "chunks", "transformed"):
        record[name] = getattr(plan, name)
    record["selection"], record["k"], record["values"] = int(plan.selection), plan.k, int(plan.values)
    record["value_bits"], record["scales"] = plan.values.format.bits, plan.values.format.scales
    record["tau_bits"], record["count_bits"] = threshold_bits(plan.tau), plan.chunk_numel.bit_length()
    record["nwords"], record["variable_length"], record["scale"] = layout.nwords, plan.variable_length, plan.scale(1.0)
    section = record["section"]
    for name in ("code", "low_bits", "entry_bits", "chunk_bits", "value_padding"):
        section[name] = getattr(layout, name)
    for name in ("indices", "scales", "values"):
        section[name] = position + getattr(layout, name)
    lengths = (plan.chunk_rows, plan.chunk_cols) if plan.transformed else (1, 1)
    for prefix, inverse in (("", False), ("inverse_", True)):
        for name, length in zip(("down", "along"), lengths, strict=True):
            record[prefix + name] = load_transform(length, device, inverse=inverse)[0]


def _chunk_bits(plan: TensorPlan, layout: Layout) -> tuple[int, int, int]:
    """Return how many bits a chunk has in each section, where that does not depend on the data."""
    form = plan.values.format
    return (
        plan.k * layout.entry_bits + layout.chunk_bits,
        16 * form.scales,
        plan.k * form.bits + layout.value_padding,
    )


def _aligned_chunks(plan: TensorPlan, layout: Layout) -> int:
    """Return how many chunks fill whole words in each section."""
    if plan.variable_count:
        return 1
    chunks = 1
    while any(chunks * bits % _WORD_BITS for bits in _chunk_bits(plan, layout)):
        chunks *= 2
    return chunks


def _places(number: int, plan: TensorPlan, firsts: NDArray[np.int64]) -> Record:
    places = np.zeros(len(firsts), PLACE)
    places["tensor"], places["chunk"] = number, firsts
    places["row"] = firsts // max(1, plan.grid_cols) * plan.chunk_rows
    places["col"] = firsts % max(1, plan.grid_cols) * plan.chunk_cols
    return places


def _plan_areas(plan: TensorPlan, group: int) -> dict[str, int]:
    """Return where a block keeps what it works on.

    Rows are an odd number of words apart: then neighbouring threads, whether they go along a row or down a column, ask
    different banks of shared memory.
    """
    numel, pitch = plan.chunk_numel, group | 1
    pitch_down, pitch_along = plan.chunk_cols | 1, pitch if plan.chunk_rows == 1 else plan.chunk_rows | 1
    row, turned = numel * pitch, max(numel, _SUM_LANES) * pitch
    if plan.transformed:
        row = max(row, plan_dct(plan.chunk_rows).height * pitch_down if plan.chunk_rows > 1 else 0)
        turned = max(turned, plan_dct(plan.chunk_cols).height * pitch_along)
    # The upper bits of Elias and Fano's code are fewer than two for each element of a chunk.
    marks = -(-2 * numel // _WORD_BITS) * group
    return {
        "group": group,
        "pitch": pitch,
        "pitch_down": pitch_down,
        "pitch_along": pitch_along,
        "turned_at": row,
        "marks_at": row + turned,
        "ranks_at": row + turned + marks,
        "block_words": row + turned + 2 * marks,
    }


_LOADING = Lock()
"""Of two threads that come first, both would load a transform, and one's memory would be freed."""


def load_transform(length: int, device: torch.device, *, inverse: bool) -> tuple[Any, Tensor]:
    """Put a transform's lists into a device's memory; return their addresses, and the memory.

    It stays there for good: a kernel may be reading it on any stream.
    """
    with _LOADING:
        return _load_transform(length, device, inverse=inverse)


@cache
def _load_transform(length: int, device: torch.device, *, inverse: bool) -> tuple[Any, Tensor]:
    program = plan_inverse_dct(length) if inverse else plan_dct(length)
    order, bounds = plan_levels(program)
    steps = np.zeros((len(order), 6), np.int32)
    steps[:, :3] = program.steps[order]
    steps[:, 4:] = program.factors[order].view(np.int32)
    lists = [program.inputs, program.outputs, bounds]
    # The steps come first: the kernel reads them aligned. The copy is waited for: other streams do not come after it.
    memory = torch.from_numpy(np.concatenate([steps.reshape(-1), *lists])).to(device)
    begins = np.cumsum([steps.size, *(part.size for part in lists)]) * WORD_NBYTES + memory.data_ptr()
    transform = np.zeros((), TRANSFORM)
    transform[()] = (program.height, len(bounds) - 1, *begins[:-1].tolist(), memory.data_ptr())
    return transform, memory
