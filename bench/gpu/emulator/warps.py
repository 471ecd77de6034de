"""Blocks of warps that run machine code on the host, in the memory that a launch points to, and count what they do.

A warp's registers are rows of numbers, one a lane. Lanes that part at a branch form groups; a group runs until it waits
for others or has left, and then the next one does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 32
SECTOR_NBYTES = 32
"""What device memory is read and written by."""
LINE_NBYTES = 128
SHARED_WINDOW = 1 << 50
"""Where generic addresses of shared memory begin: no memory of the host is there."""
RESERVED_SHARED_NBYTES = 1 << 10
"""Of a block, before the shared memory it asks for, on devices from sm_90 on."""

_BANKS, _BANK_NBYTES = 32, 4
_FIRST_ADDRESS = 1 << 12

Lanes = NDArray[np.bool_]
Row = NDArray[Any]
ALL: Lanes = np.ones(LANES, bool)

# Nothing of it is touched that no kernel reads or writes.
_MEMORY = np.ctypeslib.as_array((ctypes.c_uint8 * ((1 << 47) - 2 * _FIRST_ADDRESS)).from_address(_FIRST_ADDRESS))


class UnknownInstructionError(Exception):
    """An instruction that the library's kernels had not when this was written."""


class NotConvergedError(Exception):
    """Lanes of a warp were to work together and some were elsewhere."""


@dataclass
class Work:
    """What the warps of a launch did together.

    Args:
        executed: how often each instruction was issued, by its number.
        barriers: how often a block went on together.
        wavefronts: of the LSU pipe: how often it takes 128 bytes or, of shared memory, one word a bank.
        loaded_nbytes: of sectors of device memory that blocks read before they wrote them; of a block, each once.
        stored_nbytes: of those that they wrote, the same.

    """

    executed: list[int] = field(default_factory=list)
    barriers: int = 0
    wavefronts: int = 0
    loaded_nbytes: int = 0
    stored_nbytes: int = 0


class Warp:
    """Thirty-two lanes of a block, and their registers.

    Args:
        block: the warp's.
        number: of the warp in its block.

    """

    def __init__(self, block: Block, number: int) -> None:
        self.block = block
        self.threads = np.arange(number * LANES, (number + 1) * LANES, dtype=np.uint32)
        self.alive = self.threads < block.threads
        self.active: Lanes = self.alive.copy()
        self.at = 0
        self.is_running = False
        self.joining: dict[Hashable, Lanes] = {}
        """Lanes that are to meet at a place; all of them, where nothing is said."""
        self._ready: list[tuple[int, Lanes]] = [(0, self.active)]
        self._waiting: dict[Hashable, list[tuple[int, Lanes]]] = {}

    @property
    def has_left(self) -> bool:
        return not self.alive.any()

    def run(self) -> None:
        """Run until all lanes wait for the block, or have left."""
        steps, executed = self.block.steps, self.block.work.executed
        while self._ready:
            self.at, self.active = self._choose()
            self.is_running = True
            while self._goes_on():
                at = self.at
                executed[at] += 1
                self.at = at + 1
                steps[at](self)
        if self._waiting.keys() - {"block"}:
            raise NotConvergedError(f"lanes wait for ever at {sorted(map(str, self._waiting))}.")

    def _choose(self) -> tuple[int, Lanes]:
        return self._ready.pop()

    def _goes_on(self) -> bool:
        """Return whether the same lanes do the next instruction."""
        return self.is_running

    def jump(self, lanes: Lanes, target: int) -> None:
        """Send these of the active lanes elsewhere."""
        staying = self.active & ~lanes
        if not staying.any():
            self.at = target
        elif lanes.any():
            self._ready.append((target, lanes))
            self.active = staying

    def leave(self, lanes: Lanes) -> None:
        """Let these of the active lanes end."""
        self.alive &= ~lanes
        self.active = self.active & ~lanes
        self.is_running = bool(self.active.any())
        self.release()

    def wait(self, place: Hashable, lanes: Lanes) -> None:
        """Let these of the active lanes wait for the others of that place."""
        if not lanes.any():
            return
        # Lanes that wait at one instruction go on together.
        groups = dict(self._waiting.get(place, ()))
        groups[self.at] = groups.get(self.at, ~ALL) | lanes
        self._waiting[place] = list(groups.items())
        self.active = self.active & ~lanes
        self.is_running = bool(self.active.any())
        self.release()

    def release(self) -> None:
        """Let lanes go on together at every place where all have come."""
        for place in list(self._waiting):
            if place != "block" and not self._missing(place, self.joining.get(place, ALL)):
                self._ready += self._waiting.pop(place)

    def is_waiting_for_block(self) -> bool:
        """Return whether all lanes that have not left wait for the other warps."""
        return not self._missing("block", ALL)

    def _missing(self, place: Hashable, expected: Lanes) -> bool:
        come = np.logical_or.reduce([lanes for _, lanes in self._waiting.get(place, [])] or [~ALL])
        return bool((expected & self.alive & ~come).any())

    def go_on(self) -> bool:
        """Let lanes go on that waited for the other warps; return whether there were any."""
        groups = self._waiting.pop("block", [])
        self._ready += groups
        return bool(groups)

    def require_converged(self) -> None:
        """Raise unless no lane is elsewhere."""
        if (self.alive & ~self.active).any():
            raise NotConvergedError(f"lanes of a warp are elsewhere at instruction {self.at - 1}.")


Step = Callable[[Any], None]
"""An instruction: what it does to a warp. A kind of code has warps of its own, hence Any."""


class Block:
    """Warps that share memory.

    Args:
        steps: the kernel's instructions.
        work: counts what is done.
        number: of the block.
        blocks: of the launch.
        threads: of a block.
        shared_nbytes: that the launch asks for.

    """

    def __init__(
        self, steps: Sequence[Step], work: Work, number: int, blocks: int, threads: int, shared_nbytes: int
    ) -> None:
        self.steps, self.work, self.number, self.blocks, self.threads = steps, work, number, blocks, threads
        self.shared = np.full(RESERVED_SHARED_NBYTES + shared_nbytes, 0xCD, np.uint8)
        self.vote = self.result = False
        self.loaded, self.stored = set[int](), set[int]()

    def run(self, warps: Sequence[Warp]) -> None:
        """Run until all have left."""
        while not all(warp.has_left for warp in warps):
            for warp in warps:
                warp.run()
            if not all(warp.is_waiting_for_block() for warp in warps):
                raise NotConvergedError("some lanes of a block have come to a barrier, and others wait elsewhere.")
            self.vote, self.result = False, self.vote
            self.work.barriers += sum(warp.go_on() for warp in warps) > 0
        self.work.loaded_nbytes += SECTOR_NBYTES * len(self.loaded)
        self.work.stored_nbytes += SECTOR_NBYTES * len(self.stored)


# --- memory ----------------------------------------------------------------------------------------------------------


def _as_words(memory: NDArray[np.uint8], nbytes: int) -> Row:
    return memory[: memory.size // nbytes * nbytes].view(f"u{nbytes}")


_WORDS = {nbytes: _as_words(_MEMORY, nbytes) for nbytes in (1, 2, 4, 8)}


class Access:
    """Lanes that ask for memory, by generic addresses; a warp's lanes reach device memory or shared memory, not both.

    Args:
        warp: theirs.
        addresses: one a lane.
        nbytes: of a lane.
        lanes: which of the active ones.

    """

    def __init__(self, warp: Warp, addresses: Row, nbytes: int, lanes: Lanes) -> None:
        self._block, self._lanes, self._nbytes = warp.block, lanes, nbytes
        addresses = np.broadcast_to(addresses, LANES)[lanes].astype(np.int64)
        is_shared = bool(addresses.size) and bool(addresses[0] >= SHARED_WINDOW)
        self._is_shared = is_shared
        self._offsets = addresses - (SHARED_WINDOW if is_shared else _FIRST_ADDRESS)
        if is_shared and addresses.size and (self._offsets.max() + nbytes > warp.block.shared.size):
            raise IndexError(f"shared memory ends at {warp.block.shared.size}, got {self._offsets.max() + nbytes}.")
        if (self._offsets % nbytes).any():
            raise IndexError(f"an address is no multiple of {nbytes}.")

    def _words(self, nbytes: int) -> Row:
        return _as_words(self._block.shared, nbytes) if self._is_shared else _WORDS[nbytes]

    def load(self, rows: Sequence[Row]) -> None:
        """Fill rows of registers with neighbouring words; of less than a word, with that and zeros."""
        width = min(self._nbytes, rows[0].itemsize)
        words, first = self._words(width), self._offsets // width
        for i, row in enumerate(rows):
            row[self._lanes] = words[first + i]
        self._count(is_load=True, is_store=False)

    def store(self, rows: Sequence[Row]) -> None:
        """Write rows of registers to neighbouring words."""
        width = min(self._nbytes, rows[0].itemsize)
        words, first = self._words(width), self._offsets // width
        for i, row in enumerate(rows):
            words[first + i] = np.broadcast_to(row, LANES)[self._lanes]
        self._count(is_load=False, is_store=True)

    def combine(self, change: Callable[[int, int], int], values: Row) -> Row:
        """Let one lane after the other change what it finds; return what each found, for the lanes that took part."""
        words, first = self._words(self._nbytes), self._offsets // self._nbytes
        mine = np.broadcast_to(values, LANES)[self._lanes]
        found = np.zeros(mine.size, words.dtype)
        for i, (place, value) in enumerate(zip(first, mine, strict=True)):
            found[i] = words[place]
            words[place] = change(int(found[i]), int(value)) % (1 << 8 * self._nbytes)
        self._count(is_load=True, is_store=True, is_atomic=True)
        return found

    def _count(self, *, is_load: bool, is_store: bool, is_atomic: bool = False) -> None:
        block = self._block
        if not self._offsets.size:
            return
        if self._is_shared:
            block.work.wavefronts += self._shared_wavefronts(is_atomic=is_atomic)
            return
        # The first address is that of a line, and so of a sector.
        sectors = {*(self._offsets // SECTOR_NBYTES).tolist()}
        lines = np.unique(self._offsets // LINE_NBYTES).size
        block.work.wavefronts += max(lines, -(-self._offsets.size * self._nbytes // LINE_NBYTES))
        if is_load:
            block.loaded |= sectors - block.stored
        if is_store:
            block.stored |= sectors

    def _shared_wavefronts(self, *, is_atomic: bool) -> int:
        """Return how often the busiest bank is asked, by as many lanes at once as have 128 bytes together."""
        at_once, wavefronts = LINE_NBYTES // max(self._nbytes, _BANK_NBYTES), 0
        for begin in range(0, self._offsets.size, at_once):
            words = self._offsets[begin : begin + at_once] // _BANK_NBYTES
            words = np.concatenate([words + i for i in range(max(1, self._nbytes // _BANK_NBYTES))])
            # Lanes that ask for one word get it at once, unless each changes it.
            asked = words if is_atomic else np.unique(words)
            wavefronts += int(np.bincount(asked % _BANKS).max())
        return wavefronts


def add(before: int, value: int) -> int:
    """Return the sum."""
    return before + value


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "ADD": add,
    "MIN": min,
    "MAX": max,
    "OR": int.__or__,
    "AND": int.__and__,
    "INC": lambda before, value: 0 if before >= value else before + 1,
    "EXCH": lambda _, value: value,
}
"""What atomic operations make of what is there and what a lane gives, both without sign."""
