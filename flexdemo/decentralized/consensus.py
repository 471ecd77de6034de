"""Consensus control: replicas that are too far apart, relative to the size of their steps, mix more.

Kong et al. 2021 (arXiv 2102.04828): then decentralized training converges as fast as centralized.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from flexcomm import World
from flexdemo.parameters import COUNT, Group, Rule, check_settings, one_of

Action = Literal["rounds", "complete"]


@dataclass(frozen=True)
class ConsensusControl:
    """Settings of consensus control: when replicas are too far apart, and what is done about it.

    The distance by which the last mix moved ranks, a root mean square, is compared with ``bound * lr * gradient norm``.

    Args:
        bound: the largest distance, as a multiple of ``lr * gradient norm``.
        action: while the bound is exceeded, ``"rounds"`` adds a mixing round to every step with each comparison;
            ``"complete"`` mixes over the complete graph, with all nodes at once.
        most_rounds: the largest number of rounds in a step.
        every: the number of steps between comparisons.
        decay: of the moving average of the gradient norm; 0 takes the last norm alone.

    Example:
        >>> from flexdemo import ConsensusControl
        >>> ConsensusControl(bound=2.0, action="complete", every=20).every
        20

    """

    bound: float = 1.0
    action: Action = "rounds"
    most_rounds: int = 4
    every: int = 10
    decay: float = 0.9

    def __post_init__(self) -> None:
        rules: dict[str, Rule] = {
            "bound": (lambda value: value > 0, "above 0"),
            "action": one_of(get_args(Action)),
            "most_rounds": COUNT,
            "every": COUNT,
            "decay": (lambda value: 0 <= value < 1, "at least 0 and below 1"),
        }
        check_settings(vars(self), rules)


INITIAL_STATE: dict[str, float | int | bool] = {
    "consensus_norm": 0.0,
    "consensus_rounds": 1,
    "consensus_complete": False,
    "consensus_launched": False,
}
"""The state of consensus control, in settings of the first parameter group, because torch saves those.

``complete`` is whether the next mix is over the complete graph, ``launched`` whether the last one that was started is.
"""


def update_consensus_(
    group: Group, control: ConsensusControl, world: World, squared_distance: float, squared_norm: float
) -> None:
    """Compare the distance with the bound, over all ranks, and decide equally on all how much the next steps mix."""
    own = torch.tensor([squared_distance, squared_norm], dtype=torch.float64)
    distance, norm = world.control.all_gather(own).wait().mean(dim=0).sqrt().tolist()
    if not math.isfinite(norm + distance):
        return  # Such as those of a step that was skipped. All ranks see the same numbers.
    decay = control.decay if group["consensus_norm"] else 0.0
    group["consensus_norm"] = decay * group["consensus_norm"] + (1.0 - decay) * norm
    exceeded = distance > control.bound * float(group["lr"]) * group["consensus_norm"]
    if control.action == "complete":
        group["consensus_complete"] = exceeded
    else:
        wanted = group["consensus_rounds"] + (1 if exceeded else -1)
        group["consensus_rounds"] = min(max(wanted, 1), control.most_rounds)
