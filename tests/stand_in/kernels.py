"""The GPU's kernels on the stand-in: their text runs on the host; a launch says which memory it reads and writes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bench.gpu.cuda_on_host import HostLauncher
from flexcomm.kernels.gpu import tables
from flexcomm.kernels.layout import WORD_NBYTES

if TYPE_CHECKING:
    from pathlib import Path

    from flexcomm.kernels.gpu.tables import Record

_TABLES = ("places", "tensors", "operands", "starts")
"""What every kernel only reads."""
_SCRATCH = ("tally", "refused", "totals", "counts", "bins", "before", "placed")
"""What kernels of a bucket write for one another; wherever they have it, they are taken to write it."""
_ELEMENT_NBYTES = (4, 2, 2, 8)
_STATE_NBYTES = 4
_TRANSFORMS = ("down", "along", "inverse_down", "inverse_along")


class Access(NamedTuple):
    """Memory that a kernel reads or writes."""

    address: int
    nbytes: int
    writes: bool


class StandInLauncher(HostLauncher):
    """A launcher on the stand-in, behind what its current stream was given before."""

    def __init__(self, library: Path, native: Any) -> None:
        super().__init__(library, device_type="standin")
        self._native = native

    def launch(self, name: str, device: torch.device, grid: int, threads: int, shared_nbytes: int, job: Record) -> None:
        """Run a kernel, once its accesses are known."""
        found = self._of_mix(job) if job.dtype == tables.MIX_JOB else self._of_bucket(name, job)
        # What is read comes first: a kernel may read what it then writes.
        for access in sorted(found, key=lambda one: one.writes):
            if access.address:
                self._native.access(name, device.index, *access)
        super().launch(name, device, grid, threads, shared_nbytes, job)

    def _of_mix(self, job: Record) -> Iterator[Access]:
        one = job[0]
        nbytes = int(one["numel"]) * _ELEMENT_NBYTES[one["element"]]
        yield Access(int(one["memory"]), nbytes, writes=False)
        for term in self._rows(one["terms"], tables.TERM)[: one["term_count"]]:
            yield Access(int(term["memory"]), nbytes, writes=False)
        yield self._whole(one["terms"], writes=False)
        yield self._whole(one["distances"], writes=True)
        yield Access(int(one["out"]), nbytes, writes=True)

    def _of_bucket(self, name: str, job: Record) -> Iterator[Access]:
        one = job[0]
        is_decoding = name.startswith("decode")
        for field in _TABLES:
            yield self._whole(one[field], writes=False)
        for field in _SCRATCH:
            yield self._whole(one[field], writes=not is_decoding)
        yield self._whole(one["status"], writes=not is_decoding)
        yield from self._of_words(name, one)
        if name in ("encode", "rollback", "count_chunks") or is_decoding:
            records = self._rows(one["tensors"], tables.TENSOR)
            for record, operand in zip(records, self._rows(one["operands"], tables.OPERAND), strict=False):
                yield from self._of_tensor(name, record, operand)

    def _of_words(self, name: str, one: Any) -> Iterator[Access]:
        if not one["starts"]:
            writes = name in ("encode", "seal")
            yield Access(int(one["words"]), WORD_NBYTES * int(one["nwords"]), writes=writes)
            return
        for start, nwords in self._rows(one["starts"], np.dtype((np.int64, 2)))[: one["senders"]].tolist():
            yield Access(int(one["words"]) + WORD_NBYTES * start, WORD_NBYTES * nwords, writes=False)

    def _of_tensor(self, name: str, record: Any, operand: Any) -> Iterator[Access]:
        nbytes = int(record["rows"]) * int(record["cols"]) * _ELEMENT_NBYTES[operand["element"]]
        state_nbytes = int(record["chunks"]) * int(record["chunk_numel"]) * _STATE_NBYTES
        yield Access(int(operand["memory"]), nbytes, writes=name.startswith("decode"))
        yield Access(int(operand["state"]), state_nbytes, writes=False)
        # Scratch for coefficients is no longer than needed.
        kept_nbytes = min(state_nbytes, self._native.rest_of_block(int(operand["next_state"])))
        yield Access(int(operand["next_state"]), kept_nbytes, writes=name in ("encode", "rollback"))
        yield self._whole(record["workspace"], writes=True)
        for transform in _TRANSFORMS:
            yield self._whole(record[transform]["steps"], writes=False)

    def _whole(self, address: Any, *, writes: bool) -> Access:
        return Access(int(address), self._native.rest_of_block(int(address)), writes)

    def _rows(self, address: Any, dtype: np.dtype[Any]) -> Any:
        """Return a table in the device's memory, up to the end of what was allocated for it."""
        nbytes = self._native.rest_of_block(int(address)) // dtype.itemsize * dtype.itemsize
        octets = (ctypes.c_char * nbytes).from_address(int(address)) if nbytes else b""
        return np.frombuffer(octets, dtype.base).reshape(-1, *dtype.shape)
