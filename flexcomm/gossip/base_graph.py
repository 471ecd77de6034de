"""The Base-(k+1) graph: any number of nodes average exactly, with at most k peers each at a time.

Takezawa et al. 2023, arXiv 2305.11420. Three plans, each built from the one before:

* A *hyper-hypercube* of n = n_1 * n_2 * ... nodes, every n_i at most k+1, numbers nodes by digits and averages along
  one digit after the other.
* A *simple* graph takes the digits of n in base k+1. Each digit gives a part of as many equal blocks, and the parts
  average within themselves. Then, part by part from the largest: everybody in smaller parts links up with one node in
  every block, with weights such that each block, and the rest, has the mean of them all; the blocks spread it inside,
  while the rest goes on.
* The *base* graph splits n = p * q, p having the prime factors up to k+1. Subsets of q nodes average by the simple
  graph, and then p subsets by a hyper-hypercube; unless the simple graph of all n nodes is shorter.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import numpy as np

from flexcomm.gossip.arguments import number_of
from flexcomm.gossip.phase import Edge, Group, Phase
from flexcomm.gossip.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Nodes = Sequence[int]
    Plan = list[Phase]

__all__ = ["base"]


def base(nodes: int, k: int = 1) -> Schedule:
    """Return the Base-(k+1) graph: exact for any number of nodes, with at most ``k`` peers each at a time.

    A period takes at most ``2 * log(nodes) / log(k + 1) + 2`` steps.
    """
    nodes = number_of("nodes", nodes, "base")
    k = number_of("peers", k, "base")
    everybody = range(nodes)
    plan = min(_factored(everybody, k), _simple(everybody, k), key=len)
    return Schedule(f"base({nodes}, k={k})", nodes, tuple(plan) or (Phase(),))


def _factored(nodes: Nodes, k: int) -> Plan:
    """A plan that averages subsets first, and then the subsets with each other."""
    size = _rough_part(len(nodes), k)
    subsets = [nodes[start : start + size] for start in range(0, len(nodes), size)]
    inside = _side_by_side(_simple(subset, k) for subset in subsets)
    across = _side_by_side(_hyper_hypercube(one_of_each, k) for one_of_each in zip(*subsets, strict=True))
    return inside + across


def _simple(nodes: Nodes, k: int) -> Plan:
    """A plan that averages any number of nodes."""
    if _rough_part(len(nodes), k) == 1:
        return _hyper_hypercube(nodes, k)
    parts = _parts(nodes, k)
    inside = _side_by_side(_hyper_hypercube(list(chain.from_iterable(blocks)), k) for blocks in parts)
    joined = []
    for number, blocks in enumerate(parts[:-1]):
        rest = list(chain.from_iterable(chain.from_iterable(parts[number + 1 :])))
        spread = _side_by_side(_hyper_hypercube(block, k) for block in blocks)
        joined.append([Phase()] * number + [_link(blocks, rest)] + spread)
    return inside + _side_by_side(joined)


def _parts(nodes: Nodes, k: int) -> list[list[Nodes]]:
    """The nodes in one part for each digit of their number in base k+1, the largest first, in as many equal blocks."""
    parts: list[list[Nodes]] = []
    size, start = 1, 0
    while size * (k + 1) <= len(nodes):
        size *= k + 1
    while size:
        digit = (len(nodes) - start) // size
        blocks = [nodes[start + size * number : start + size * (number + 1)] for number in range(digit)]
        parts += [blocks] if blocks else []
        start += size * digit
        size //= k + 1
    return parts


def _link(blocks: list[Nodes], rest: Nodes) -> Phase:
    """Everybody in ``rest`` with one node of every block, so that each block and the rest get the mean of all.

    Needs all nodes of ``blocks`` to hold the same, and fewer nodes in ``rest`` than in a block.
    """
    size = len(blocks[0])
    weight = size / (size * len(blocks) + len(rest))
    links = [(one, block[place]) for place, one in enumerate(rest) for block in blocks]
    return Phase(edges=tuple(Edge(*ends, weight) for one, other in links for ends in ((one, other), (other, one))))


def _hyper_hypercube(nodes: Nodes, k: int) -> Plan:
    """A plan that averages along one digit of a node's place after the other."""
    plan, stride = [], 1
    for factor in _fewest_factors(len(nodes), k + 1):
        along = np.reshape(nodes, (-1, factor, stride)).swapaxes(1, 2).reshape(-1, factor).tolist()
        plan.append(Phase(tuple(Group(tuple(members)) for members in along)))
        stride *= factor
    return plan


@lru_cache(maxsize=1024)
def _fewest_factors(number: int, largest: int) -> tuple[int, ...]:
    """The shortest way to write a number as a product of factors up to ``largest``; its primes are no larger."""
    if number == 1:
        return ()
    choices = [factor for factor in range(min(largest, number), 1, -1) if number % factor == 0]
    ways = [(factor, *_fewest_factors(number // factor, largest)) for factor in choices]
    return min(ways, key=len)


def _rough_part(number: int, k: int) -> int:
    """What is left of a number without its prime factors up to k+1."""
    for factor in range(2, k + 2):
        while number % factor == 0:
            number //= factor
    return number


def _side_by_side(plans: Iterable[Plan]) -> Plan:
    """Plans for different nodes at the same time; who is done earlier rests."""
    together = zip_longest(*plans, fillvalue=Phase())
    return [
        Phase(
            tuple(chain.from_iterable(phase.groups for phase in phases)),
            tuple(chain.from_iterable(phase.edges for phase in phases)),
        )
        for phases in together
    ]
