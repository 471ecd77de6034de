"""Instructions, barriers and bytes of a kernel: instructions of every basic block, times how often it executes.

Machine code says which instructions there are, and of which lines; the kernel run on the host says how often warps pass
the regions of its text (``COUNT(name)``). What branches and loops the compiler left decides the rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from bench.gpu.accesses import find_access, find_pipe, find_same_addresses
from bench.gpu.flow import find_executions
from bench.gpu.machine_code import BasicBlock, Frame, Instruction, find_loops, find_reached
from bench.gpu.regions import Region

_TOLERATED = 0.05


class Launch(NamedTuple):
    """A kernel that ran on the host: its blocks, and how many of their warps passed each region."""

    kernel: str
    blocks: int
    warps_per_block: int
    passes: Mapping[str, int]
    shared_nbytes: int = 0
    """Shared memory that a block asks for at its launch."""

    @property
    def warps(self) -> int:
        """Return the number of warps."""
        return self.blocks * self.warps_per_block


@dataclass
class Count:
    """What all warps of a launch do together; ``notes`` say what the count does not know."""

    issued: float = 0.0
    pipes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    regions: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    barriers: float = 0.0
    loaded_nbytes: float = 0.0
    stored_nbytes: float = 0.0
    notes: list[str] = field(default_factory=list)


class Scope(NamedTuple):
    """A region as it was inlined: the lines that called it, outermost first, and the region."""

    callers: tuple[Frame, ...]
    region: Region


Chain = tuple[Scope, ...]
"""The scopes around a line, outermost first. Outside of all of them every warp passes once."""


def count_kernel(blocks: Sequence[BasicBlock], regions: Sequence[Region], launch: Launch) -> Count:
    """Count a launch.

    An instruction is said to execute as often as warps passed the innermost region that holds its line, or the line
    that called it; outside of the compiled loops, as often as what is around the loops of the text, for it was moved
    out of them. All instructions of a basic block execute equally often, and warps that enter leave: see
    :func:`find_executions`. What follows only where a warp is not converged never executes; a subroutine does as often
    as it is called.
    """
    count, reached = Count(), find_reached(blocks)
    depths = _find_depths(blocks, reached)
    chains = {id(one): _chain(one.frames, regions) for number in reached for one in blocks[number].instructions}
    _note_unmarked_loops(blocks, depths, chains, count.notes)
    passes = _find_passes(set(chains.values()), launch)
    _share_among_copies(blocks, depths, chains, passes, count.notes)
    votes = {
        number: Counter(
            passes[_leave_loops(chains[id(one)], depth)] for one in blocks[number].instructions if one.frames
        )
        for number, depth in depths.items()
    }
    leaves = {number for number in reached if _leaves(blocks[number])}
    times = find_executions({n: blocks[n].successors & reached for n in reached}, leaves, votes, launch.warps)
    against = sum(sum(abs(times[number] - said) * many for said, many in votes[number].items()) for number in reached)
    _add_subroutines(blocks, times)
    same_addresses = find_same_addresses(blocks)
    for number, executed in times.items():
        for one in blocks[number].instructions:
            chain = chains.get(id(one))
            where = chain[-1].region.name if chain else "-"
            _add(count, one, executed, where, same_address=id(one) in same_addresses)
    count.barriers /= launch.warps_per_block
    if against > _TOLERATED * count.issued:
        count.notes.append(f"branches contradict the lines of {against / count.issued:.0%} of the instructions")
    return count


def _add(count: Count, one: Instruction, executed: float, where: str, *, same_address: bool) -> None:
    access, pipe = find_access(one, same_address=same_address), find_pipe(one)
    count.issued += executed
    count.pipes["issued"] += executed
    count.pipes[pipe] += executed * (access.wavefronts if pipe == "LSU" else 1)
    count.regions[where] += executed
    count.barriers += executed * one.opcode.startswith(("BAR.SYNC", "bar.sync", "barrier.sync"))
    count.loaded_nbytes += executed * access.loaded_nbytes
    count.stored_nbytes += executed * access.stored_nbytes


def _chain(frames: Sequence[Frame], regions: Sequence[Region]) -> Chain:
    scopes, callers = list[Scope](), tuple[Frame, ...]()
    for file, line in reversed(frames):
        scopes += [Scope(callers, one) for one in regions if one.file == file and one.first <= line <= one.last]
        callers = (*callers, (file, line))
    return tuple(scopes)


def _find_passes(chains: Iterable[Chain], launch: Launch) -> dict[Chain, float]:
    """Return how often warps pass each chain of scopes.

    A region that was inlined at several places has one number of passes for all: it is shared out as often as what is
    around each place is passed. What is no loop cannot be passed more often than what is around it: then there are
    several copies of it in a row.
    """
    known = {chain[:length] for chain in chains for length in range(len(chain) + 1)} | {()}
    passes: dict[Chain, float] = {(): float(launch.warps)}

    def find(chain: Chain) -> float:
        if chain not in passes:
            region, around = chain[-1].region, find(chain[:-1])
            everywhere = sum(find(one[:-1]) for one in known if one and one[-1].region == region)
            share = launch.passes.get(region.name, 0) * around / everywhere if everywhere else 0.0
            passes[chain] = share if region.loop else min(share, around)
        return passes[chain]

    for chain in known:
        find(chain)
    return passes


def _loops_of(chain: Chain) -> int:
    return sum(scope.region.loop for scope in chain)


def _leave_loops(chain: Chain, depth: int) -> Chain:
    """Return the scopes around a line, without those in more than ``depth`` loops."""
    while _loops_of(chain) > depth:
        chain = chain[:-1]
    return chain


def _find_depths(blocks: Sequence[BasicBlock], reached: set[int]) -> dict[int, int]:
    """Return in how many loops each block is."""
    depths = dict.fromkeys(reached, 0)
    for depth, loop in find_loops(blocks, reached):
        depths |= dict.fromkeys(loop, depth)
    return depths


def _note_unmarked_loops(
    blocks: Sequence[BasicBlock], depths: Mapping[int, int], chains: Mapping[int, Chain], notes: list[str]
) -> None:
    for depth, loop in find_loops(blocks, depths):
        inside = [one for number in loop for one in blocks[number].instructions if one.frames]
        if all(_loops_of(chains[id(one)]) < depth for one in inside):
            lines = Counter(one.frames[-1] for one in inside)
            where = "{}:{}".format(*lines.most_common(1)[0][0]) if lines else "no line"
            notes.append(f"a loop at {where} has no COUNT: counted as one round")


def _share_among_copies(
    blocks: Sequence[BasicBlock],
    depths: Mapping[int, int],
    chains: Mapping[int, Chain],
    passes: dict[Chain, float],
    notes: list[str],
) -> None:
    """Share the rounds of a loop among the copies of its body that the compiler made, in the loop and before it.

    Copies are found as equal instructions of one line: most of those in the loop are there as often as the body is.
    """
    inside: dict[Chain, Counter[tuple[str, tuple[Frame, ...]]]] = {}
    outside: Counter[tuple[str, tuple[Frame, ...]]] = Counter()
    for number, depth in depths.items():
        for one in blocks[number].instructions:
            chain = chains[id(one)]
            if chain and chain[-1].region.loop:
                found = inside.setdefault(chain, Counter()) if depth >= _loops_of(chain) else outside
                found[one.opcode, one.frames] += 1
    for chain, alike in inside.items():
        copies, peeled = median_low(alike.values()), median_low(outside[one] for one in alike)
        passes[chain] = max(0.0, passes[chain] - peeled * passes[chain[:-1]]) / copies
        if copies > 1 and passes[chain]:
            notes.append(f"the loop {chain[-1].region.name} has {copies} copies of its body: each had as many rounds")


def _leaves(block: BasicBlock) -> bool:
    return not block.successors or any(one.opcode in ("EXIT", "ret", "exit") for one in block.instructions)


def _add_subroutines(blocks: Sequence[BasicBlock], times: dict[int, float]) -> None:
    """Add the blocks of every subroutine, as often as the calls execute."""
    called: defaultdict[str, float] = defaultdict(float)
    for number, executed in times.items():
        called[blocks[number].calls] += executed
    for number, block in enumerate(blocks):
        for label in called.keys() & set(block.labels):
            times |= dict.fromkeys(find_reached(blocks, number), called[label])
