"""Graphs: schedules known by name. Each takes the number of nodes; for one node it does nothing.

[Note: Base-(k+1) graphs]
Any number of nodes average exactly, with at most k peers each at a time. Takezawa et al. 2023, arXiv 2305.11420.

* A *hyper-hypercube* of n = n_1 * n_2 * ... nodes, every n_i at most k+1, numbers nodes by digits and averages along
  one digit after the other.
* A *simple* graph takes the digits of n in base k+1. Each digit gives a part of as many equal blocks, which averages
  inside. Then, from the largest part on: every node in smaller parts is linked with one node of every block, with
  weights such that each block, and the rest, has the mean of all. Blocks average inside, the rest goes on.
* The *base* graph splits n = p * q, p having the prime factors up to k+1. Subsets of q nodes average by the simple
  graph, and then p subsets by a hyper-hypercube; unless the simple graph of all n nodes is shorter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, zip_longest

import numpy as np

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.phase import Edge, Group, Phase, as_count
from flexcomm.gossip.schedule import RandomSchedule, Schedule, from_edges, reachable

Nodes = Sequence[int]
Phases = list[Phase]


def complete(nodes: int) -> Schedule:
    """Return the schedule in which all nodes average at every step: exact, with the most traffic."""
    nodes = as_count("nodes", nodes, "complete")
    return Schedule(f"complete({nodes})", nodes, (Phase((Group(tuple(range(nodes))),)),))


def ring(nodes: int) -> Schedule:
    """Return the schedule in which every node averages with one neighbour on a ring, then with the other.

    If the number of nodes is odd, one of them has no peer at each step: node 0, then 1, then 2.
    """
    nodes = as_count("nodes", nodes, "ring")
    # A ring of two has one link; an odd one needs a third phase for the link that two matchings leave out.
    starts = range(min(2, nodes - 1)) if nodes % 2 == 0 else range(1, min(4, nodes + 1))
    firsts = range(0, nodes - 1, 2)
    pairs = ([((start + first) % nodes, (start + first + 1) % nodes) for first in firsts] for start in starts)
    return Schedule(f"ring({nodes})", nodes, tuple(Phase(tuple(map(Group, phase))) for phase in pairs))


def fixed_ring(nodes: int) -> Schedule:
    """Return the schedule in which every node averages with both neighbours on a ring at every step, a third each.

    It is fixed, as compressed mixing needs. Two nodes have one neighbour each, and average by halves.
    """
    nodes = as_count("nodes", nodes, "fixed_ring")
    links = ((node, (node + 1) % nodes) for node in range(nodes) if nodes > 1)
    return from_edges(nodes, links, name=f"fixed_ring({nodes})")


def one_peer_exponential(nodes: int) -> Schedule:
    """Return the schedule in which node j of 2**n averages with ``j ^ 1``, then ``j ^ 2``, ``j ^ 4``: exact in n."""
    nodes = as_count("nodes", nodes, "one_peer_exponential")
    if nodes & (nodes - 1):
        raise InvalidArgumentError(
            f"one_peer_exponential was asked for {nodes} nodes, but needs a power of two: use base({nodes}), which is "
            f"exact for any number, or directed_exponential({nodes})."
        )
    return Schedule(f"one_peer_exponential({nodes})", nodes, base(nodes).phases)


def alternating(schedule: Schedule) -> Schedule:
    """Return the schedule in which every phase is split into two steps, so that half of its links are in use at a time.

    The connected components of a phase are numbered by their lowest nodes: the even ones mix first, then the odd ones.
    """
    halves = chain.from_iterable(map(_halve, schedule.phases))
    return Schedule(f"alternating({schedule.name})", schedule.nodes, tuple(halves))


def alternating_exponential_ring(nodes: int) -> Schedule:
    """Return the schedule of alternating exponential rings (AER): exact, and half of the nodes send at a time.

    Pairs of nodes at distance 1, 2, 4, ... average one distance after the other, even pairs first, then odd ones: that
    of Wang et al. 2024 (arXiv 2410.11998), in which odd pairs come first. If the number of nodes is no power of two,
    the phases of :func:`base` replace the pairs.
    """
    nodes = as_count("nodes", nodes, "alternating_exponential_ring")
    return Schedule(f"alternating_exponential_ring({nodes})", nodes, alternating(base(nodes)).phases)


def static_exponential(nodes: int) -> Schedule:
    """Return the schedule in which node i sends to i + 1, i + 2, i + 4, ... (modulo nodes), all at every step.

    Directed, but doubly stochastic, with equal weights; fixed, as compressed mixing needs.
    """
    nodes = as_count("nodes", nodes, "static_exponential")
    hops = _hops(nodes)
    weight = 1.0 / (len(hops) + 1)
    edges = (Edge(node, (node + hop) % nodes, weight) for hop in hops for node in range(nodes))
    return Schedule(f"static_exponential({nodes})", nodes, (Phase(edges=tuple(edges)),))


def directed_exponential(nodes: int) -> Schedule:
    """Return the schedule in which node i sends half of its value to i + 1, then to i + 2, i + 4, ... (modulo nodes).

    Doubly stochastic; exact for powers of two only (Assran et al. 2019, arXiv 1811.10792).
    """
    nodes = as_count("nodes", nodes, "directed_exponential")
    edges = (tuple(Edge(node, (node + hop) % nodes, 0.5) for node in range(nodes)) for hop in _hops(nodes))
    return Schedule(f"directed_exponential({nodes})", nodes, tuple(Phase(edges=one) for one in edges) or (Phase(),))


def _hops(nodes: int) -> list[int]:
    """Return the powers of two below the number of nodes."""
    return [1 << power for power in range((nodes - 1).bit_length())]


def _halve(phase: Phase) -> Phases:
    """Return the even and the odd connected components of a phase, numbered by their lowest nodes."""
    links = defaultdict(set)
    for source, target in phase.links():
        links[source].add(target)
        links[target].add(source)
    halves: dict[int, int] = {}
    half = 0
    for node in sorted(links):
        if node not in halves:
            halves |= dict.fromkeys(reachable(node, links), half)
            half = 1 - half
    # A group of one has no links, and is in neither half.
    groups = [tuple(group for group in phase.groups if halves.get(group.members[0]) == half) for half in (0, 1)]
    edges = [tuple(edge for edge in phase.edges if halves[edge.source] == half) for half in (0, 1)]
    return list(map(Phase, groups, edges))


def base(nodes: int, k: int = 1) -> Schedule:
    """Return the Base-(k+1) graph: exact for any number of nodes, with at most ``k`` peers each at a time.

    A period takes at most ``2 * log(nodes) / log(k + 1) + 2`` steps. See [Note: Base-(k+1) graphs].
    """
    nodes = as_count("nodes", nodes, "base")
    k = as_count("peers", k, "base")
    size = _rough_part(nodes, k)
    subsets = [range(start, start + size) for start in range(0, nodes, size)]
    inside = _side_by_side(_simple(subset, k) for subset in subsets)
    across = _side_by_side(_hyper_hypercube(one_of_each, k) for one_of_each in zip(*subsets, strict=True))
    phases = min(inside + across, _simple(range(nodes), k), key=len)
    return Schedule(f"base({nodes}, k={k})", nodes, tuple(phases) or (Phase(),))


def _simple(nodes: Nodes, k: int) -> Phases:
    """Return phases that average any number of nodes."""
    if _rough_part(len(nodes), k) == 1:
        return _hyper_hypercube(nodes, k)
    # One part for each digit of the number of nodes in base k+1, cut into as many equal blocks.
    parts: list[list[Nodes]] = []
    size, start = 1, 0
    while size * (k + 1) <= len(nodes):
        size *= k + 1
    while size:
        starts = range(start, len(nodes) - size + 1, size)
        parts += [[nodes[start : start + size] for start in starts]] if starts else []
        start += size * len(starts)
        size //= k + 1
    inside = _side_by_side(_hyper_hypercube(list(chain.from_iterable(blocks)), k) for blocks in parts)
    linked = []
    for number, blocks in enumerate(parts[:-1]):
        rest = list(chain.from_iterable(chain.from_iterable(parts[number + 1 :])))
        spread = _side_by_side(_hyper_hypercube(block, k) for block in blocks)
        linked.append([Phase()] * number + [_link(blocks, rest)] + spread)
    return inside + _side_by_side(linked)


def _link(blocks: list[Nodes], rest: Nodes) -> Phase:
    """Return the phase that links every node of ``rest``, fewer than in a block, with one node of every block."""
    size = len(blocks[0])
    weight = size / (size * len(blocks) + len(rest))
    links = [(one, block[place]) for place, one in enumerate(rest) for block in blocks]
    return Phase(edges=tuple(Edge(*ends, weight) for one, other in links for ends in ((one, other), (other, one))))


def _hyper_hypercube(nodes: Nodes, k: int) -> Phases:
    """Return phases that average along one digit of a node's position after the other."""
    phases, stride = [], 1
    for factor in _fewest_factors(len(nodes), k + 1):
        along = np.reshape(nodes, (-1, factor, stride)).swapaxes(1, 2).reshape(-1, factor).tolist()
        phases.append(Phase(tuple(Group(tuple(members)) for members in along)))
        stride *= factor
    return phases


@lru_cache(maxsize=1024)
def _fewest_factors(number: int, largest: int) -> tuple[int, ...]:
    """Return the shortest list of factors up to ``largest`` whose product is ``number``; its primes are no larger."""
    if number == 1:
        return ()
    candidates = [factor for factor in range(min(largest, number), 1, -1) if number % factor == 0]
    lists = [(factor, *_fewest_factors(number // factor, largest)) for factor in candidates]
    return min(lists, key=len)


def _rough_part(number: int, k: int) -> int:
    """Return a number without its prime factors up to k+1."""
    for factor in range(2, k + 2):
        while number % factor == 0:
            number //= factor
    return number


def _side_by_side(sequences: Iterable[Phases]) -> Phases:
    """Merge sequences of phases for different nodes into one; nodes of shorter sequences have no peer at the end."""
    return [
        Phase(tuple(chain(*(phase.groups for phase in phases))), tuple(chain(*(phase.edges for phase in phases))))
        for phases in zip_longest(*sequences, fillvalue=Phase())
    ]


def random_matching(nodes: int, seed: int = 0) -> RandomSchedule:
    """Return the schedule in which every step pairs the nodes at random; of an odd number one has no peer.

    On average a step halves the squared distance from the mean; no number of steps makes it exact.
    """
    return RandomSchedule(nodes, seed)
