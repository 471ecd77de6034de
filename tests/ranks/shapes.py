"""The worlds that laws are kept in: every way in which up to four ranks make nodes of one size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """So many nodes of so many ranks; ``2x1`` is two nodes of one rank."""

    nodes: int
    ranks_per_node: int

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


SHAPES = (Shape(1, 1), Shape(1, 2), Shape(2, 1), Shape(2, 2), Shape(3, 1), Shape(4, 1))
ALWAYS = (Shape(2, 2), Shape(3, 1))
"""Where ``make test`` keeps laws: a world with both kinds of groups, and one with an odd number of nodes. ``make
test-all`` keeps them in all worlds."""
