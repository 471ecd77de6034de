"""Push-sum: averages on directed graphs, where what a node hears need not weigh as much as what it sends."""

from __future__ import annotations

from flexcomm.errors import InvalidArgumentError

__all__ = ["PushSum"]


class PushSum:
    """The weight of this node, carried from round to round; the sum over all nodes stays their number.

    Tensors are kept de-biased, as ``z = x / weight``: what is sent is ``z`` with the weight beside it, and what comes
    counts with its sender's. The mean that rounds preserve, and lead to, is that of ``weight * z``.
    """

    def __init__(self, weight: float = 1.0) -> None:
        if not 0.0 < weight < float("inf"):
            raise InvalidArgumentError(f"a push-sum weight of {weight} is not a finite number above 0: begin with 1.")
        self.weight = weight

    def state_dict(self) -> dict[str, float]:
        """Return the weight."""
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a weight."""
        self.weight = PushSum(float(state["weight"])).weight
