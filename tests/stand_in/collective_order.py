"""Finds out whether collectives that ranks enqueued on several groups can hang on devices.

A device works on collectives in the order in which its rank enqueued them, whatever their groups, if there is no room
for several at once. So there must be one order that every rank keeps, and all ranks of a group must enqueue the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from tests.stand_in.collectives import Enqueued

COMM_THREAD = "flexcomm-"
_MESSAGES = ("send", "recv")


def find_disorder(logs: Sequence[Sequence[Enqueued]]) -> list[str]:
    """Return what is wrong with what ranks enqueued, given by rank."""
    return [*_by_other_threads(logs), *_different_calls(logs), *_cycles(logs)]


def _by_other_threads(logs: Sequence[Sequence[Enqueued]]) -> Iterator[str]:
    for rank, log in enumerate(logs):
        for name, count in Counter(one.thread for one in log if one.thread.startswith(COMM_THREAD)).items():
            yield f"rank {rank}: {count} collectives of a device were enqueued by thread {name}, not by the model's"


def _different_calls(logs: Sequence[Sequence[Enqueued]]) -> Iterator[str]:
    calls: dict[tuple[str, tuple[int, ...]], dict[int, list[object]]] = defaultdict(lambda: defaultdict(list))
    for rank, log in enumerate(logs):
        for one in log:
            of_group = calls[one.group, one.ranks]
            of_group[rank] += [what for what in one.what if what[0] not in _MESSAGES]
    for (group, ranks), by_rank in calls.items():
        for rank in ranks:
            if by_rank[rank] != by_rank[ranks[0]]:
                yield (
                    f"group {group} of ranks {ranks}: rank {ranks[0]} enqueued {by_rank[ranks[0]]}, rank {rank} "
                    f"{by_rank[rank]}"
                )


def _cycles(logs: Sequence[Sequence[Enqueued]]) -> Iterator[str]:
    before: dict[Hashable, set[Hashable]] = defaultdict(set)
    for rank, log in enumerate(logs):
        counted: Counter[Hashable] = Counter()
        previous: list[Hashable] = []
        for one in log:
            nodes = [_number(name, counted) for name in _names(one, rank)]
            for node in nodes:
                before[node] |= set(previous)
            previous = nodes
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        yield f"ranks enqueued these in different orders, and may wait for each other: {error.args[1]}"


def _names(one: Enqueued, rank: int) -> Iterator[Hashable]:
    """Yield what the ranks that take part call a collective alike: a message by who sends it to whom."""
    own = one.ranks.index(rank)
    for verb, peer, _ in one.what:
        if verb in _MESSAGES:
            yield one.group, one.ranks, "message", *((own, peer) if verb == "send" else (peer, own))
        else:
            yield one.group, one.ranks, "collective"


def _number(name: Hashable, counted: Counter[Hashable]) -> Hashable:
    counted[name] += 1
    return name, counted[name]
