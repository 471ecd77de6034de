"""Random schedules: every step draws its own phase, the same on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from flexcomm.gossip.arguments import number_of, whole_number
from flexcomm.gossip.averaging import MOST_NODES, contraction_of
from flexcomm.gossip.phase import Group, Phase
from flexcomm.gossip.schedule import ScheduleReport

__all__ = ["RandomSchedule", "random_matching"]

_PAIR = 2


def random_matching(nodes: int, seed: int = 0) -> RandomSchedule:
    """Return the schedule in which every step pairs the nodes anew, at random; of an odd number one stays alone.

    On average a step halves the squared distance from the mean, whatever the number of nodes; no number of steps
    makes it exact. Works for any number of nodes, also where some of them are slow in turn.
    """
    return RandomSchedule(nodes, seed)


@dataclass(frozen=True)
class RandomSchedule:
    """Random pairs at every step: a function of the seed and the step, and of nothing else.

    It has no period. ``contraction`` is that of the first ``measured_phases`` phases, a sample and no promise.
    """

    nodes: int
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", number_of("nodes", self.nodes, "random_matching"))
        object.__setattr__(self, "seed", whole_number(self.seed, "the seed of random_matching"))

    @property
    def name(self) -> str:
        return f"random_matching({self.nodes}, seed={self.seed})"

    @property
    def period(self) -> None:
        """None: phases do not repeat."""
        return

    def phase(self, step: int) -> Phase:
        """Return the phase of a step; any whole number is one."""
        return _draw_matching(self.nodes, self.seed, int(step))

    @property
    def is_doubly_stochastic(self) -> bool:
        return True

    @property
    def is_symmetric(self) -> bool:
        return True

    @property
    def is_fixed(self) -> bool:
        return False

    @property
    def is_exact(self) -> bool:
        """Whether a phase averages all nodes: where there is one pair at most."""
        return self.nodes <= _PAIR

    @property
    def measured_phases(self) -> int:
        """Over how many phases ``contraction`` is measured: four times log2(nodes), or one where one is exact."""
        return 1 if self.is_exact else 4 * (self.nodes - 1).bit_length()

    @cached_property
    def contraction(self) -> float:
        """By which factor the first ``measured_phases`` phases at least shrink the distance from the mean."""
        if self.is_exact:
            return 0.0
        return contraction_of([self.phase(step) for step in range(self.measured_phases)], self.nodes)

    @property
    def most_peers(self) -> int:
        return min(1, self.nodes - 1)

    def report(self) -> ScheduleReport:
        """Return what to expect of this schedule; it prints as one line."""
        contraction = self.contraction if self.nodes <= MOST_NODES else None
        return ScheduleReport(
            self.name, self.nodes, None, self.most_peers, contraction, self.is_exact, self.measured_phases
        )

    @property
    def digest(self) -> str:
        """A short text that two random schedules share if, and only if, they are equal; the same in every process."""
        return hashlib.blake2b(self.name.encode(), digest_size=16).hexdigest()

    def __str__(self) -> str:
        return f"{self.name}: random pairs at every step"


# One phase is asked for many times in a step, by each bucket, and the next one while the last is under way.
@lru_cache(maxsize=16)
def _draw_matching(nodes: int, seed: int, step: int) -> Phase:
    key = hashlib.blake2b(f"matching {seed} {step}".encode(), digest_size=16).digest()
    # Sorting raw draws, not Generator.permutation: numpy promises the former's bits in all its versions.
    draws = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(nodes)
    order = np.argsort(draws, kind="stable").tolist()
    return Phase(tuple(Group((one, other)) for one, other in zip(order[::2], order[1::2], strict=False)))
