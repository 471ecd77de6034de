"""Push-sum: averages on directed graphs, where nodes may receive more or less weight than they send."""

from __future__ import annotations

from flexcomm.errors import InvalidArgumentError

__all__ = ["PushSum"]


class PushSum:
    """The push-sum weight of this node, kept from round to round; the weights of all nodes sum to their number.

    Tensors are stored de-biased, as ``z = x / weight``. A node sends ``z`` with its weight, and receivers multiply the
    two. Rounds preserve, and converge to, the mean of ``weight * z``.

    Args:
        weight: the weight to begin with; 1 on all nodes, unless a state is restored.

    Example:
        >>> import torch, flexcomm
        >>> push_sum = flexcomm.PushSum()  # one for each set of tensors
        >>> with flexcomm.connect() as world:
        ...     schedule = flexcomm.gossip.directed_exponential(world.topology.nodes)
        ...     flexcomm.mix(torch.ones(2), schedule, 0, world=world, push_sum=push_sum).tensors
        tensor([1., 1.])

    """

    def __init__(self, weight: float = 1.0) -> None:
        if not 0.0 < weight < float("inf"):
            raise InvalidArgumentError(f"a push-sum weight of {weight} is not a finite number above 0: begin with 1.")
        self.weight = weight

    def state_dict(self) -> dict[str, float]:
        """Return the weight."""
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the weight of a state."""
        self.weight = PushSum(float(state["weight"])).weight
