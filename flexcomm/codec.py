"""Codec: one bucket to one buffer and back, so that one collective carries several tensors.

First what follows from shapes: what is sent of a tensor, how tensors are cut into shards, and the layout of a bucket's
buffer. Chunks never straddle tensors, which are cut between chunks, by their own plan and name: how tensors are put
into buckets changes no bit of the result.

Then ``Encoder`` and ``Decoder``: one bucket to one buffer, and the buffers of all senders to averages. ``docs/wire.md``
specifies the buffer. A receiver trusts nothing: what it expects follows from its own plan. Kernels find what is wrong
(``verify``), and here it becomes a message.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import NamedTuple, SupportsInt

import torch
from torch import Tensor

from flexcomm.compress import Compressor, TensorSpec, dense
from flexcomm.errors import CompressorError, InvalidArgumentError, InvalidTensorError, WireError
from flexcomm.kernels import (
    LARGEST_MAGNITUDE,
    STORE,
    Average,
    BufferPlan,
    Epilogue,
    Kernels,
    Problem,
    Region,
    Selection,
    StateUpdate,
    Status,
    TensorPlan,
    plan_layout,
)
from flexcomm.kernels.layout import (
    ALIGNMENT,
    HEADER_NBYTES,
    HEADER_NWORDS,
    MAGIC,
    NONFINITE,
    PAYLOAD_NBYTES_AT,
    VERSION,
    WORD_NBYTES,
    Header,
    checksum_of,
)

_TINY_NUMEL = 64
_PLAIN = StateUpdate()
_ENCODED_WRONG = (
    "The checksum fits, so it was sent like that: run flexcomm.testing.check_kernels there, or look at its memory."
)
_PROBLEMS = {
    Problem.HEADER: ("header", "it is not the expected one"),
    Problem.COUNTS: ("counts", "a chunk of {name} is said to hold more entries than it can, or all of them too many"),
    Problem.LENGTH: ("length", "its payloads do not end where the buffer does"),
    Problem.INDEX: ("indices", "of {name}: they leave the chunk, repeat, do not increase, or are not all there"),
    Problem.SCALE: ("scales", "of {name}: one is negative or not finite"),
    Problem.VALUE: ("values", "of {name}: one is not finite"),
    Problem.ENTRIES: ("count", "it does not hold as many entries as it announces"),
}


def plan_tensor(spec: TensorSpec, compressor: Compressor) -> TensorPlan:
    """Return what is sent of a tensor: what the compressor plans, or all of it where that is shorter.

    Args:
        spec: the tensor.
        compressor: plans what is sent.

    """
    plan, whole = compressor.plan(spec), dense().plan(spec)
    if plan.rows * plan.cols != math.prod(spec.shape):
        planned = f"{plan.rows} x {plan.cols} elements for {spec.name} of {list(spec.shape)}"
        raise CompressorError(f"{compressor} plans {planned}, but must cover the tensor exactly.")
    if is_dense(plan):
        return plan
    # A variable length is known only afterwards; a tiny tensor's payload is judged by its greatest length.
    entries = 0 if plan.variable_length and plan.cols * plan.rows > _TINY_NUMEL else plan.entries
    return plan if plan_layout(plan, entries).nwords <= plan_layout(whole, whole.entries).nwords else whole


def is_dense(plan: TensorPlan) -> bool:
    """Return whether a plan sends every element as a float: in a dtype that was asked for, so none replaces it."""
    return plan.selection is Selection.EVERYTHING and not plan.transformed and not plan.values.format.scales


def plan_buffer(specs: Sequence[TensorSpec], compressor: Compressor) -> BufferPlan:
    """Return how these tensors share a buffer. A tensor that would be longer than if sent whole is sent whole."""
    return assemble_buffer(tuple(specs), tuple(plan_tensor(spec, compressor) for spec in specs))


def assemble_buffer(specs: tuple[TensorSpec, ...], plans: tuple[TensorPlan, ...]) -> BufferPlan:
    # The text of docs/wire.md that is hashed. It is a part of the format: names in it are not the classes'.
    tensors = [(spec.name, spec.shape, str(spec.dtype)) for spec in specs]
    described = ", ".join(map(_describe, plans)) + ("," if len(plans) == 1 else "")
    text = f"({VERSION}, {tensors!r}, ({described}))"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return BufferPlan.of(specs, plans, int.from_bytes(digest, "little"))


def _describe(plan: TensorPlan) -> str:
    return (
        f"TensorPlan(rows={plan.rows!r}, cols={plan.cols!r}, chunk_rows={plan.chunk_rows!r}, "
        f"chunk_cols={plan.chunk_cols!r}, transformed={plan.transformed!r}, "
        f"selection=<Selection.{plan.selection.rule.wire_name}: {int(plan.selection)}>, keep={plan.k!r}, "
        f"values=<ValueCode.{plan.values.name}: {int(plan.values)}>, tau={plan.tau!r}, seed={plan.seed!r}, "
        f"exact={plan.variable_length!r})"
    )


class TensorShard(NamedTuple):
    """Elements ``first`` to ``last`` of a flattened tensor, chunks from ``first_chunk`` on, and the plan for them."""

    spec: TensorSpec
    plan: TensorPlan
    first: int
    last: int
    first_chunk: int

    @property
    def numel(self) -> int:
        return self.last - self.first

    def of(self, tensor: Tensor) -> Tensor:
        """Return this shard of a tensor: a view, if the tensor is contiguous."""
        return tensor.reshape(-1)[self.first : self.last].view(self.spec.shape)

    def state_of(self, state: Tensor) -> Tensor:
        return state[self.first_chunk : self.first_chunk + self.plan.chunks]


def shard_tensor(spec: TensorSpec, plan: TensorPlan, ranks: int) -> list[TensorShard | None]:
    """Return the shard of each rank; None for ranks that get nothing of a tensor with too few chunks.

    The name decides which rank gets the first shard: otherwise rank 0 would get all the small tensors.

    Args:
        spec: the tensor.
        plan: what is sent of it, by :func:`plan_tensor`.
        ranks: the number of ranks of a node.

    """
    # By rows of chunks, or by chunks if there is one row. A last row of chunks that holds a single row of elements
    # stays with the one before: alone, it would be a plan for a tensor of one row, and chunked differently.
    is_flat = plan.rows <= 1
    units = plan.grid_cols if is_flat else plan.grid_rows - (plan.rows % plan.chunk_rows == 1 and plan.grid_rows > 1)
    bounds = [units * number // ranks for number in range(ranks + 1)]
    shards = [_make_shard(spec, plan, units, *bounds[number : number + 2]) for number in range(ranks)]
    offset = zlib.crc32(spec.name.encode()) % ranks
    return shards[-offset:] + shards[:-offset]


def _make_shard(spec: TensorSpec, plan: TensorPlan, units: int, begin: int, end: int) -> TensorShard | None:
    """Return units ``begin`` to ``end`` of a tensor that can be cut into ``units``."""
    if begin == end:
        return None
    if begin == 0 and end == units:
        return TensorShard(spec, plan, 0, plan.rows * plan.cols, 0)
    shape: tuple[int, ...]
    if plan.rows <= 1:
        first, last = begin * plan.chunk_cols, plan.cols if end == units else end * plan.chunk_cols
        shape, part, first_chunk = (last - first,), replace(plan, cols=last - first), begin
    else:
        top, bottom = begin * plan.chunk_rows, plan.rows if end == units else end * plan.chunk_rows
        first, last = top * plan.cols, bottom * plan.cols
        shape, part = (bottom - top, plan.cols), replace(plan, rows=bottom - top)
        first_chunk = begin * plan.grid_cols
    if plan.variable_count:
        # By chunks, not by units: the last one may hold two rows of chunks.
        part = replace(part, k=-(-plan.k * part.chunks // plan.chunks))
    return TensorShard(TensorSpec(f"{spec.name}[{first}:{last}]", shape, spec.dtype), part, first, last, first_chunk)


class Encoder:
    """Fills one buffer of at least ``plan.nbytes`` again and again; it is checked and sliced once."""

    def __init__(self, plan: BufferPlan, buffer: Tensor, kernels: Kernels) -> None:
        self.buffer = buffer
        self._plan, self._words = plan, to_words(buffer)
        # Kernels write where the plan says, without looking: too short a buffer would be written past its end.
        if self._words.numel() < plan.nwords:
            raise InvalidTensorError(f"the buffer has {buffer.numel()} bytes, but the plan needs {plan.nbytes}.")
        self._kernel = kernels.encoder(plan, self._words[: plan.nwords])
        self.mark_nonfinite_ = self._kernel.mark_nonfinite_
        self.status: SupportsInt = 0
        """What the last call found, as :class:`flexcomm.kernels.Status` reads it; asking a device waits for it."""

    def encode_(
        self,
        tensors: Sequence[Tensor],
        states: Sequence[Tensor] | None = None,
        states_out: Sequence[Tensor] | None = None,
        update: StateUpdate = _PLAIN,
        *,
        step: int,
        sequence: int,
    ) -> str:
        """Fill the buffer and move what it holds out of the states. Tensors and states must be the plan's.

        Returns what is wrong with them, if anything is: then the buffer says that this sender has nothing to send.
        """
        self.enqueue_(tensors, states, states_out, update, step=step, sequence=sequence)
        return self.problem(tensors)

    def enqueue_(
        self,
        tensors: Sequence[Tensor],
        states: Sequence[Tensor] | None,
        states_out: Sequence[Tensor] | None,
        update: StateUpdate,
        *,
        step: int,
        sequence: int,
    ) -> None:
        """Do as :meth:`encode_` does, without waiting for a device: :attr:`status` says what it found."""
        self.status = self._kernel.encode_(tensors, states, states_out, update, step=step, sequence=sequence)

    def rollback_(self, tensors: Sequence[Tensor], states: Sequence[Tensor], update: StateUpdate, *, step: int) -> None:
        """Take back what the last call did to states that it updated in place."""
        # After a problem they are as before.
        if int(self.status) == 0:
            self._kernel.rollback_(tensors, states, update, step=step)

    def problem(self, tensors: Sequence[Tensor]) -> str:
        """Return what was wrong with the tensors of the last call, or their states, if anything was."""
        word = int(self.status)
        if word == 0:
            return ""
        status = Status.of(word)
        if status.problem is Problem.STATE:
            name = self._plan.specs[status.tensor].name
            return f"NaN or infinity in the state kept for {name}: zero all states, or load them from a checkpoint"
        named = zip(self._plan.specs, tensors, strict=True)
        names = [spec.name for spec, x in named if not bool((x.abs() < LARGEST_MAGNITUDE).all())]
        return f"NaN, infinity or a magnitude of 2**100 or more in {', '.join(names)}"

    @property
    def payload_nbytes(self) -> Tensor:
        """How many bytes behind the header are filled, one int64 where the buffer is."""
        return self.buffer.view(-1)[PAYLOAD_NBYTES_AT : PAYLOAD_NBYTES_AT + torch.int64.itemsize].view(torch.int64)

    @property
    def nbytes(self) -> int:
        """How many bytes of the buffer are filled."""
        return HEADER_NBYTES + int(self.payload_nbytes)


class Decoder:
    """Checks and decodes the buffers of several senders, in memory that is filled again and again.

    Buffers are added in the order they lie in ``gathered``. ``nbytes`` are their lengths as the senders say, if not the
    plan's; a ``WireError`` refuses one that cannot be. ``decoded_as`` is a plan with the same payloads that says what
    to decode them to, if not ``plan`` itself; each buffer is the sum of those of ``summed`` nodes.
    """

    def __init__(
        self,
        plan: BufferPlan,
        gathered: Tensor,
        senders: Sequence[str],
        kernels: Kernels,
        nbytes: Sequence[int] | None = None,
        decoded_as: BufferPlan | None = None,
        summed: int = 1,
    ) -> None:
        self._regions: list[Region] = []
        start, least = 0, HEADER_NBYTES if plan.variable_length else plan.nbytes
        for sender, length in zip(senders, nbytes or [plan.nbytes] * len(senders), strict=True):
            if not least <= length <= plan.nbytes or length % ALIGNMENT:
                needed = f"from {least} to {plan.nbytes}, in steps of {ALIGNMENT}: install one release on every rank."
                raise WireError(sender, "length", f"it has {length} bytes, but the plan says {needed}")
            self._regions.append(Region(sender, start, length // WORD_NBYTES))
            start += length // WORD_NBYTES
        self._plan, self._words = plan, to_words(gathered)
        self._kernel = kernels.decoder(plan, self._words, self._regions, decoded_as, summed)

    def verify(self, *, step: int, sequence: int) -> list[str]:
        """Check all buffers, or raise ``WireError``; return the senders that had nonfinite values and sent nothing."""
        return self.explain(int(self.check(step=step, sequence=sequence)), step=step, sequence=sequence)

    def check(self, *, step: int, sequence: int) -> SupportsInt:
        """Check all buffers without waiting for a device; return the status word, for :meth:`explain`."""
        return self._kernel.verify(step=step, sequence=sequence)

    def explain(self, word: int, *, step: int, sequence: int) -> list[str]:
        """Raise ``WireError`` if a status word says so; return the senders with nonfinite values."""
        if word == 0:
            return []
        status = Status.of(word)
        region = self._regions[status.sender]
        if status.problem is Problem.HEADER:
            check_header(self._words, region, self._plan.header(step, sequence))
        if status.problem is not Problem.NONFINITE:
            field, text = _PROBLEMS[status.problem]
            text = text.format(name=self._plan.specs[status.tensor].name)
            raise WireError(region.sender, field, f"{text}. {_ENCODED_WRONG}")
        return [region.sender for region in self._regions if read_header(self._words, region).flags == NONFINITE]

    def decode_(self, outputs: Sequence[Tensor], *, step: int, average: Average, epilogue: Epilogue = STORE) -> None:
        """Do with ``outputs`` and the averages of buffers that were verified what the epilogue says."""
        self._kernel.decode_(outputs, step=step, average=average, epilogue=epilogue)


def read_header(words: Tensor, region: Region) -> Header:
    return Header.unpack(words[region.start : region.start + HEADER_NWORDS].cpu().numpy().tobytes())


def check_header(words: Tensor, region: Region, expected: Header) -> Header:
    """Return a sender's header; raise if it is not the expected one, or if the checksum does not fit."""
    got, checksum = read_header(words, region), checksum_of(words[region.start : region.end].cpu().numpy())
    ours, nbytes = expected.matching(got), region.nwords * WORD_NBYTES - HEADER_NBYTES
    one_release = "install one release on every rank."
    fields = {
        "magic": (got.magic, MAGIC, "this is no buffer of ours. Hand over what was encoded, from its first byte on."),
        "version": (got.version, VERSION, one_release),
        "payload bytes": (got.payload_nbytes, nbytes, "so many are here. Hand over as many as were encoded."),
        "checksum": (f"{got.checksum:08x}", f"{checksum:08x}", "it was damaged: check that node's memory and link."),
        "spare bytes": (got.spare.hex(" ", 4) if any(got.spare) else "zero", "zero", one_release),
        "plan hash": (f"{got.plan:016x}", f"{ours.plan:016x}", "tensors, names, order or compressor differ."),
        "step": (got.step, ours.step, "a rank skipped or repeated one. After a restart, load one checkpoint on all."),
        "sequence": (got.sequence, ours.sequence, "make the same calls, in the same order, on every rank."),
        "flags": (got.flags, ours.flags, one_release),
        "count": (got.entries, ours.entries, _ENCODED_WRONG),
    }
    for field, (theirs, needed, advice) in fields.items():
        if theirs != needed:
            raise WireError(region.sender, field, f"it is {theirs}, but must be {needed}: {advice}")
    return got


def to_words(buffer: Tensor) -> Tensor:
    """Return a uint8 buffer, of whatever shape, as the int32 words kernels work on; the same memory."""
    is_cut = buffer.numel() % WORD_NBYTES or buffer.storage_offset() % WORD_NBYTES
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or is_cut:
        raise InvalidTensorError(
            f"a buffer is {buffer.dtype} with strides {buffer.stride()}, {buffer.numel()} bytes from byte "
            f"{buffer.storage_offset()} on, but must be contiguous torch.uint8, cut at multiples of {ALIGNMENT} bytes."
        )
    return buffer.view(-1).view(torch.int32)


def check_numbers(step: int, sequence: int) -> None:
    for name, number in (("step", step), ("sequence", sequence)):
        is_whole = type(number) is int or (type(number) is not bool and isinstance(number, Integral))
        if not is_whole or not 0 <= number < 1 << 64:
            raise InvalidArgumentError(f"{name} is {number!r}, but must be a whole number from 0 to 2**64 - 1.")
