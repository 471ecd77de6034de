"""How often each basic block executes: as its instructions' lines say, corrected by what branches allow.

Lines are not enough: the compiler merges equal code of two branches under the line of one, and moves code out of loops.
But as many warps leave a block as enter it. Of all executions that keep that, the ones are taken that contradict the
fewest instructions: a flow of least cost, found by successive shortest paths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

_NOTHING = 1e-6
_UNBOUNDED = float("inf")


class _Network:
    """Arcs with capacity left and cost; arc ``i ^ 1`` is the way back of arc ``i``."""

    def __init__(self, nodes: int) -> None:
        self.excess = [0.0] * nodes
        self.arcs: list[list[int]] = [[] for _ in range(nodes)]
        self.heads: list[int] = []
        self.left: list[float] = []
        self.costs: list[int] = []

    def add(self, tail: int, head: int, capacity: float, cost: int) -> int:
        for begin, end, left, price in ((tail, head, capacity, cost), (head, tail, 0.0, -cost)):
            self.arcs[begin].append(len(self.heads))
            self.heads.append(end)
            self.left.append(left)
            self.costs.append(price)
        return len(self.heads) - 2

    def balance(self) -> None:
        """Move every excess to where something is missing, by the cheapest ways."""
        while True:
            path = self._find_path()
            if not path:
                return
            start, end = self.heads[path[0] ^ 1], self.heads[path[-1]]
            amount = min(self.excess[start], -self.excess[end], *(self.left[arc] for arc in path))
            self.excess[start] -= amount
            self.excess[end] += amount
            for arc in path:
                self.left[arc] -= amount
                self.left[arc ^ 1] += amount

    def _find_path(self) -> list[int]:
        costs = [0.0 if excess > _NOTHING else _UNBOUNDED for excess in self.excess]
        came_by = [-1] * len(costs)
        ahead = deque(node for node, cost in enumerate(costs) if cost == 0.0)
        waiting = set(ahead)
        while ahead:
            node = ahead.popleft()
            waiting.discard(node)
            for arc in self.arcs[node]:
                head, cost = self.heads[arc], costs[node] + self.costs[arc]
                if self.left[arc] > _NOTHING and cost < costs[head]:
                    costs[head], came_by[head] = cost, arc
                    if head not in waiting:
                        waiting.add(head)
                        ahead.append(head)
        missing = [node for node, excess in enumerate(self.excess) if excess < -_NOTHING and came_by[node] >= 0]
        path = list[int]()
        if missing:
            node = min(missing, key=lambda one: costs[one])
            while self.excess[node] <= _NOTHING or not path:
                path.append(came_by[node])
                node = self.heads[came_by[node] ^ 1]
        return path[::-1]


def find_executions(
    successors: Mapping[int, set[int]],
    leaves: set[int],
    votes: Mapping[int, Mapping[float, int]],
    entered: float,
) -> dict[int, float]:
    """Return how often each block executes.

    Args:
        successors: of each block, those that may follow; block 0 is the first.
        leaves: blocks with an exit.
        votes: for each block, how many of its instructions are said to execute how often.
        entered: how often the first block is entered.

    """
    numbers = {block: i for i, block in enumerate(successors)}
    outside = 2 * len(numbers)
    network = _Network(outside + 1)
    steps: dict[int, list[tuple[int, int]]] = {}
    starts: dict[int, float] = {}
    for block, i in numbers.items():
        inside, behind = 2 * i, 2 * i + 1
        for following in successors[block]:
            network.add(behind, 2 * numbers[following], _UNBOUNDED, 0)
        if block in leaves:
            network.add(behind, outside, _UNBOUNDED, 0)
        starts[block] = _median(votes[block])
        steps[block] = _add_votes(network, inside, behind, votes[block], starts[block])
        network.excess[behind] += starts[block]
        network.excess[inside] -= starts[block]
    network.excess[2 * numbers[0]] += entered
    network.excess[outside] -= entered
    network.balance()
    return {block: starts[block] + sum(sign * network.left[arc ^ 1] for arc, sign in steps[block]) for block in numbers}


def _median(votes: Mapping[float, int]) -> float:
    half, seen = sum(votes.values()) / 2, 0
    for times in sorted(votes):
        seen += votes[times]
        if seen >= half:
            return times
    return 0.0


def _add_votes(
    network: _Network, inside: int, behind: int, votes: Mapping[float, int], start: float
) -> list[tuple[int, int]]:
    """Let the block execute more often than ``start``, or less; each costs the instructions that it contradicts."""
    added = list[tuple[int, int]]()
    agree = sum(count for times, count in votes.items() if times <= start)
    against, at = 2 * agree - sum(votes.values()), start
    for times in (*sorted(one for one in votes if one > start), _UNBOUNDED):
        added.append((network.add(inside, behind, times - at, against), 1))
        against, at = against + 2 * votes.get(times, 0), times
    agree = sum(count for times, count in votes.items() if times >= start)
    against, at = 2 * agree - sum(votes.values()), start
    for times in (*sorted((one for one in votes if one < start), reverse=True), 0.0):
        if at > times:
            added.append((network.add(behind, inside, at - times, against), -1))
        against, at = against + 2 * votes.get(times, 0), times
    return added
