"""The GPU's kernel set: which kernels are launched for a bucket, and what they are told.

A bucket takes one launch to encode, to verify and to decode; where the number of entries depends on the data, a fixed
number more. Nothing here waits for the device: outcomes are words in its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flexcomm.device import to_device
from flexcomm.kernels.base import (
    STORE,
    Average,
    DeviceStatus,
    Epilogue,
    States,
    StateUpdate,
    Tensors,
    are_in_place,
)
from flexcomm.kernels.gpu.launcher import CupyLauncher
from flexcomm.kernels.gpu.tables import (
    JOB,
    MIX_JOB,
    MOST_COUNTED_SENDERS,
    OPERAND,
    PLACE,
    SECTION,
    TERM,
    THREADS,
    BucketTables,
    Record,
    upload,
)
from flexcomm.kernels.layout import (
    HEADER_NBYTES,
    HEADER_NWORDS,
    NONFINITE,
    WORD_NBYTES,
    BufferPlan,
    Header,
    Region,
    checksum_of,
)
from flexcomm.kernels.plan import BINS, NO_SAMPLE_KEY, SampleKey

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""As ``bits.cuh`` numbers them."""
_WORDS_OF_BLOCK = 2048
"""The words that a block of ``verify`` or ``seal`` adds up to a checksum."""
_MIX_THREADS, _MIX_ELEMENTS, _MIX_BLOCKS = 256, 8, 1024
_NOTHING_FOUND = -1
"""What a tally of ``bucket.cuh`` begins with, at rest: the bits of no problem. The rest of it is 0."""


class Launcher(Protocol):
    """What the kernel set needs of CUDA; tests run the same text on the host."""

    def shared_nbytes(self, device: torch.device) -> int: ...

    def launch(
        self, name: str, device: torch.device, grid: int, threads: int, shared_nbytes: int, job: Record
    ) -> None: ...


class GpuKernels:
    """Kernels compiled by NVRTC, on torch's current stream; temporaries come from torch's allocator."""

    name = "gpu"

    def __init__(self, launcher: Launcher | None = None) -> None:
        self._launcher = CupyLauncher() if launcher is None else launcher

    def encoder(self, plan: BufferPlan, words: Tensor) -> GpuEncoder:
        return GpuEncoder(self._launcher, plan, words)

    def decoder(
        self,
        plan: BufferPlan,
        words: Tensor,
        regions: Sequence[Region],
        decoded_as: BufferPlan | None = None,
        summed: int = 1,
    ) -> GpuDecoder:
        return GpuDecoder(self._launcher, plan, words, regions, decoded_as or plan, summed)

    def mix_(self, x: Tensor, self_weight: float, others: Tensors, weights: Sequence[float], out: Tensor) -> Tensor:
        if x.numel() == 0:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        mixed = [
            (one.data_ptr(), weight)
            for one, weight in zip((x, *others), (self_weight, *weights), strict=True)
            if weight != 0.0
        ]
        terms = upload(np.array(mixed or [(0, 0.0)], TERM), x.device)
        grid = min(-(-x.numel() // (_MIX_THREADS * _MIX_ELEMENTS)), _MIX_BLOCKS)
        distances = torch.empty(grid, dtype=torch.float64, device=x.device)
        addresses = (one.data_ptr() for one in (x, out, distances, terms))
        job = np.array([(*addresses, x.numel(), _ELEMENTS[x.dtype], len(mixed))], MIX_JOB)
        # Each thread of a block has a float64 to add up.
        self._launcher.launch("mix", x.device, grid, _MIX_THREADS, 8 * _MIX_THREADS, job)
        return distances.sum()


class _BucketKernel:
    """What encoders and decoders share: a job, and the memory that it points to."""

    def __init__(self, launcher: Launcher, plan: BufferPlan, words: Tensor, senders: int) -> None:
        self._launcher, self._plan, self._words, self._device = launcher, plan, words, words.device
        self.job = np.zeros(1, JOB)
        self._held: dict[str, Tensor] = {}
        self._operands = np.zeros(max(1, len(plan.plans)), OPERAND)
        self._uploaded = b""
        tally = self._integers(2 * senders)
        tally[::2] = _NOTHING_FOUND
        self.set(words=words, status=self._integers(1), tally=tally)
        self.set(senders=senders, tensor_count=len(plan.plans), is_variable_length=plan.variable_length)

    def set(self, **fields: Any) -> None:
        """Set fields of the job: to numbers, or the addresses of tensors of the device, which are held."""
        for name, value in fields.items():
            if isinstance(value, Tensor):
                self._held[name] = value
                value = value.data_ptr()
            self.job[name] = value

    def _integers(self, numel: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def _set_header(self, header: Header) -> None:
        octets = header.pack(self._plan.nbytes - HEADER_NBYTES)
        self.job["header"] = np.frombuffer(octets, np.uint32)

    def _set_operands(
        self, tensors: Tensors, states: States, states_out: States, keys: Sequence[SampleKey], factors: Sequence[float]
    ) -> None:
        table = self._operands[: len(tensors)]
        table["memory"] = [x.data_ptr() for x in tensors]
        table["state"] = [x.data_ptr() for x in states] if states else 0
        table["next_state"] = [x.data_ptr() for x in states_out] if states_out else 0
        table["element"] = [_ELEMENTS[x.dtype] for x in tensors]
        table["key"] = [one.key & 0xFFFFFFFF for one in keys]
        table["start"] = [one.start for one in keys]
        table["factor"] = factors
        # Addresses are often those of the last call.
        octets = table.tobytes()
        if octets != self._uploaded or not self._uploaded:
            self.set(operands=upload(self._operands, self._device))
            self._uploaded = octets

    def _keys(self, step: int) -> Sequence[SampleKey]:
        plan = self._plan
        return plan.sample_keys(step) if plan.has_keys else [NO_SAMPLE_KEY] * len(plan.plans)

    def _launch(self, name: str, grid: int, shared_nbytes: int = THREADS * WORD_NBYTES) -> None:
        self._launcher.launch(name, self._device, grid, THREADS, shared_nbytes, self.job)


class GpuEncoder(_BucketKernel):
    """A :class:`flexcomm.kernels.base.BucketEncoder`."""

    def __init__(self, launcher: Launcher, plan: BufferPlan, words: Tensor) -> None:
        super().__init__(launcher, plan, words, senders=1)
        most = launcher.shared_nbytes(self._device)
        tiled = not plan.variable_length
        self._tables = tables = BucketTables(plan, plan.plans, self._device, most, by_word=True, tiled=tiled)
        # Chunks go back without registers, whatever their shape.
        self._plain_tables = BucketTables(plan, plan.plans, self._device, most, by_word=False, tiled=False)
        used = HEADER_NWORDS + sum(layout.nwords for layout in plan.layouts)
        self.set(refused=self._integers(max(1, tables.chunks), torch.uint8), nwords=plan.nwords, used_words=used)
        if tables.has_shared_words:
            self.set(open=self._integers(plan.nwords))
        if tables.variables:
            count, counted = partial(self._integers, dtype=torch.int32), tables.counted
            self.set(totals=count(2 + 2 * tables.variables), counts=count(2 * counted), bins=count(1))
            self.set(before=count(counted + tables.variables), counted=counted, variables=tables.variables)
            self.set(sections=self._integers(len(plan.plans) * SECTION.itemsize, torch.uint8))
            self.job["placed"] = self.job["sections"]
            own = [
                places for places, one in zip(tables.places_by_tensor, plan.plans, strict=True) if one.variable_count
            ]
            self._counted_places = upload(np.concatenate(own), self._device)
            self._counted_blocks = sum(map(len, own))
            tensors = np.zeros(tables.variables, PLACE)
            tensors["tensor"] = [number for number, one in enumerate(plan.plans) if one.variable_count]
            self._variable_tensors = upload(tensors, self._device)

    def encode_(
        self, tensors: Tensors, states: States, states_out: States, update: StateUpdate, *, step: int, sequence: int
    ) -> DeviceStatus:
        in_place = are_in_place(states, states_out)
        inputs = [x.detach().contiguous() for x in tensors]
        kept = states_out or self._scratch_states()
        factors = [plan.scale(update.gain) for plan in self._plan.plans]
        self._set_operands(inputs, states if states_out else None, kept, self._keys(step), factors)
        self.set(decay=update.decay, stays=1.0 - update.alpha)
        self._set_header(self._plan.header(step, sequence)._replace(entries=max(0, self._plan.entries)))
        # What was forgotten cannot be put back.
        copies = [state.clone() for state in states or ()] if in_place and update.decay == 0.0 else []
        if self._tables.variables:
            self._find_entries()
        self._start("encode")
        if self._tables.variables:
            blocks = -(-self._plan.nwords // _WORDS_OF_BLOCK)
            self.set(share=_WORDS_OF_BLOCK)
            self._launch("seal", blocks)
        restore = None
        if in_place:
            restore = partial(self._restore, inputs, states or (), copies, update, step)
        return DeviceStatus(self._held["status"], restore)

    def rollback_(self, tensors: Tensors, states: Tensors, update: StateUpdate, *, step: int) -> None:
        inputs = [x.detach().contiguous() for x in tensors]
        factors = [plan.scale(-update.gain / update.decay) for plan in self._plan.plans]
        self._set_operands(inputs, None, states, self._keys(step), factors)
        self.set(decay=1.0 / update.decay, stays=update.alpha)
        self._start("rollback", self._plain_tables)

    def mark_nonfinite_(self, *, step: int, sequence: int) -> None:
        plan = self._plan
        words = np.zeros(HEADER_NWORDS if plan.variable_length else plan.nwords, np.int32)
        header = Header(plan.digest, step, sequence, 0, NONFINITE)
        for checksum in (0, None):
            octets = header.pack(words.nbytes - HEADER_NBYTES, checksum_of(words) if checksum is None else checksum)
            words[:HEADER_NWORDS] = np.frombuffer(octets, np.int32)
        self._words[: words.size].copy_(to_device(torch.from_numpy(words), self._device))

    def _start(self, name: str, tables: BucketTables | None = None) -> None:
        tables = tables or self._tables
        self.set(places=tables.places, tensors=tables.tensors)
        self._launch(name, tables.blocks, tables.shared_nbytes)

    def _find_entries(self) -> None:
        """Count what reaches thresholds, raise those that too much reaches, and find places for payloads."""
        tables = self._tables
        self._words[HEADER_NWORDS:] = 0
        self.set(bins=self._integers(tables.variables * BINS, torch.int32), tensors=tables.tensors)
        for is_recount in (False, True):
            self.set(places=self._counted_places, is_recount=is_recount)
            self._launch("count_chunks", self._counted_blocks, tables.shared_nbytes)
            if not is_recount:
                self.set(places=self._variable_tensors)
                self._launch("raise_thresholds", tables.variables)
        self._launch("place_entries", 1)

    def _scratch_states(self) -> Tensors | None:
        """Return memory for coefficients that are read again; None, if no chunk is worked on in registers."""
        if not any(self._tables.is_tiled):
            return None
        return [
            torch.empty(plan.state_shape if tiled else 0, device=self._device)
            for plan, tiled in zip(self._plan.plans, self._tables.is_tiled, strict=True)
        ]

    def _restore(self, tensors: Tensors, states: Tensors, copies: Tensors, update: StateUpdate, step: int) -> None:
        if copies:
            for state, copy in zip(states, copies, strict=True):
                state.copy_(copy)
            return
        self.rollback_(tensors, states, update, step=step)


class GpuDecoder(_BucketKernel):
    """A :class:`flexcomm.kernels.base.BucketDecoder`."""

    def __init__(
        self,
        launcher: Launcher,
        plan: BufferPlan,
        words: Tensor,
        regions: Sequence[Region],
        decoded_as: BufferPlan,
        summed: int,
    ) -> None:
        super().__init__(launcher, plan, words, senders=len(regions))
        self._decoded_as, self._divisor = decoded_as, len(regions) * summed
        self._most_shared = launcher.shared_nbytes(self._device)
        self._tables: dict[bool, BucketTables] = {}
        self._is_verified = False
        starts = upload(np.array([[region.start, region.nwords] for region in regions], np.int64), self._device)
        groups = [np.arange(0, one.chunks, THREADS) for one in plan.plans]
        places = np.zeros(sum(map(len, groups)), PLACE)
        places["chunk"] = np.concatenate([*groups, np.zeros(0)])
        places["tensor"] = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        longest = max((region.nwords for region in regions), default=0)
        self._blocks = max(1, len(places), -(-longest // _WORDS_OF_BLOCK))
        self._checked = upload(places, self._device)
        self.set(starts=starts, blocks=self._blocks, share=-(-longest // self._blocks), place_count=len(places))
        if plan.variable_count:
            tables = self._tables_for(tiled=False)
            each = tables.counted + tables.variables
            self.set(before=self._integers(len(regions) * each, torch.int32), counted=tables.counted)
            sections = self._integers(len(regions) * len(plan.plans) * SECTION.itemsize, torch.uint8)
            self.set(sections=sections, variables=tables.variables)
            self.job["placed"] = self.job["sections"]

    def verify(self, *, step: int, sequence: int) -> DeviceStatus:
        self._is_verified = True
        self._set_header(self._plan.header(step, sequence)._replace(entries=max(0, self._plan.entries)))
        self.set(tensors=self._tables_for(tiled=False).tensors, places=self._checked)
        if self._plan.variable_count:
            self._launch("locate", int(self.job["senders"][0]))
        self._launch("verify", int(self.job["senders"][0]) * self._blocks)
        return DeviceStatus(self._held["status"])

    def decode_(self, outputs: Tensors, *, step: int, average: Average, epilogue: Epilogue = STORE) -> None:
        divisor = self._divisor if average == "nodes" else 0
        can_count = divisor or int(self.job["senders"][0]) <= MOST_COUNTED_SENDERS
        tiled = bool(can_count) and torch.float64 not in [out.dtype for out in outputs]
        tables, plans = self._tables_for(tiled=tiled), self._decoded_as.plans
        # Kernels write contiguous memory only.
        filled = [out.detach() if out.is_contiguous() else out.detach().contiguous() for out in outputs]
        keys = self._decoded_as.sample_keys(step) if self._decoded_as.has_keys else [NO_SAMPLE_KEY] * len(plans)
        self._set_operands(filled, None, None, keys, [1.0] * len(plans))
        self.set(places=tables.places, tensors=tables.tensors, divisor=divisor, lr=epilogue.lr, keep=epilogue.keep)
        self.set(reciprocal=1.0 / divisor if divisor else 1.0, is_exact=divisor > 0 and divisor & (divisor - 1) == 0)
        status = int(self.job["status"][0])
        self.job["status"] = status if self._is_verified else 0
        self._launch(f"decode_{epilogue.kind}", tables.blocks, tables.shared_nbytes)
        self.job["status"] = status
        for out, contiguous in zip(outputs, filled, strict=True):
            if not out.is_contiguous():
                out.detach().copy_(contiguous)

    def _tables_for(self, *, tiled: bool) -> BucketTables:
        tiled = tiled and not self._plan.variable_length
        if tiled not in self._tables:
            decoded_as = self._decoded_as.plans
            self._tables[tiled] = BucketTables(
                self._plan, decoded_as, self._device, self._most_shared, by_word=False, tiled=tiled
            )
        return self._tables[tiled]
