"""Consensus control: nodes that drift too far apart for the size of their steps mix more, until they do not.

Kong et al. 2021 (arXiv 2102.04828): while the distance between replicas stays below a critical value, decentralized
training is as fast as centralized. It follows the size of a step, so that is what the distance is held against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from flexcomm import InvalidArgumentError

if TYPE_CHECKING:
    from flexcomm import World
    from flexdemo.parameters import Group

__all__ = ["BEGINNING", "ConsensusControl", "Judge"]

Action = Literal["rounds", "complete"]


@dataclass(frozen=True)
class ConsensusControl:
    """Every ``every`` steps all ranks compare how far the last mix moved them with ``bound * lr * gradient norm``.

    Both are root mean squares over all ranks, the norm with memory ``decay``. While the bound is exceeded, every step
    mixes one round more, up to ``most_rounds``, or, with ``action="complete"``, with all nodes at once.
    """

    bound: float = 1.0
    action: Action = "rounds"
    most_rounds: int = 4
    every: int = 10
    decay: float = 0.9

    def __post_init__(self) -> None:
        wrong = [
            words
            for words, is_wrong in {
                f"bound is {self.bound!r}, but must be above 0": not self.bound > 0,
                f"action is {self.action!r}, but must be one of {', '.join(get_args(Action))}": (
                    self.action not in get_args(Action)
                ),
                f"most_rounds is {self.most_rounds!r}, but must be at least 1": self.most_rounds < 1,
                f"every is {self.every!r}, but must be at least 1": self.every < 1,
                f"decay is {self.decay!r}, but must be at least 0 and below 1": not 0 <= self.decay < 1,
            }.items()
            if is_wrong
        ]
        if wrong:
            raise InvalidArgumentError(f"{'; '.join(wrong)}.")


BEGINNING: dict[str, float | int | bool] = {
    "consensus_norm": 0.0,
    "consensus_rounds": 1,
    "consensus_complete": False,
    "consensus_launched": False,
}
"""What a judge remembers, as settings of a parameter group: torch saves those."""


class Judge:
    """Decides, alike on all ranks, how much is mixed. What it remembers lies in the first parameter group."""

    def __init__(self, control: ConsensusControl, world: World, groups: list[Group]) -> None:
        self.control, self._world, self._groups = control, world, groups

    @property
    def rounds(self) -> int:
        """How many rounds a step mixes."""
        rounds: int = self._groups[0]["consensus_rounds"]
        return rounds

    @property
    def mixes_all(self) -> bool:
        """Whether what leaves now is mixed by all nodes at once."""
        complete: bool = self._groups[0]["consensus_complete"]
        return complete

    @property
    def launched_all(self) -> bool:
        """Whether that was so for what left last: it may have to leave again, when a state is loaded."""
        launched: bool = self._groups[0]["consensus_launched"]
        return launched

    def note_launch(self) -> None:
        self._groups[0]["consensus_launched"] = self.mixes_all

    def is_due(self, step: int) -> bool:
        return step % self.control.every == 0

    def hear(self, squared_distance: float, squared_norm: float, lr: float) -> None:
        """Compare what all ranks saw, on all of them together, and decide for the steps to come."""
        mine = torch.tensor([squared_distance, squared_norm], dtype=torch.float64)
        distance, norm = self._world.control.all_gather(mine).wait().mean(dim=0).sqrt().tolist()
        said, control = self._groups[0], self.control
        if not math.isfinite(norm) or not math.isfinite(distance):
            # Of a step that was left out, say: nothing to learn from. All ranks see the same numbers.
            return
        decay = control.decay if said["consensus_norm"] else 0.0
        said["consensus_norm"] = decay * said["consensus_norm"] + (1.0 - decay) * norm
        is_apart = distance > control.bound * lr * said["consensus_norm"]
        if control.action == "complete":
            said["consensus_complete"] = is_apart
        else:
            wanted = self.rounds + (1 if is_apart else -1)
            said["consensus_rounds"] = min(max(wanted, 1), control.most_rounds)
