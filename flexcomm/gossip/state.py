"""State of mixing that is kept from step to step: the residuals of compressed mixing, and the push-sum weight.

[Note: compressed mixing] Nodes send the change since their last message, and keep what peers know of them: CHOCO's rule
(Koloskova et al. 2019) for symmetric graphs, and the same on push-sum's numerators (Taheri et al. 2020) for directed
ones. Every node keeps ``public``, the value that its peers know of its ``x``, and ``public_sum``, the weighted sum of
the public values of all nodes it receives from and of its own. In a round it sends ``q = Q(x - public)``, and then

    public += q;  public_sum += sum of w_j * q_j;  x += gamma * (public_sum - public)

``public_sum`` depends on the weights of the graph, so these must not change from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flexcomm.compress import Compressor, TensorSpec
from flexcomm.errors import CompressorError, InvalidArgumentError
from flexcomm.kernels import TensorPlan

_MOST_BIASED_GAMMA = 0.9
_FEW_MAGNITUDES = 4
_LARGE = {False: (1 << 22,), True: (1 << 11, 1 << 11)}
"""Shapes for which the share that a compressor sends is computed: flat, or of two dims."""


class _State(NamedTuple):
    public: Tensor
    public_sum: Tensor


class MixResiduals:
    """The state of compressed mixing for one set of tensors: the values that peers know, and their weighted sum.

    It starts at zero. If all nodes hold the same values at first, :meth:`begin` saves sending them. A round that fails
    leaves the state unchanged.

    Example:
        >>> import torch, flexcomm
        >>> residuals = flexcomm.MixResiduals()  # one for each set of tensors, kept from step to step
        >>> with flexcomm.connect() as world:
        ...     ring = flexcomm.gossip.fixed_ring(world.topology.nodes)
        ...     int8 = flexcomm.dense(values="int8")
        ...     flexcomm.mix(torch.ones(2), ring, 0, world=world, compressor=int8, residuals=residuals).tensors
        tensor([1., 1.])

    """

    def __init__(self) -> None:
        self._state: _State | None = None
        self._next: _State | None = None
        self._claimed = False

    def claim(self) -> None:
        """Reserve the state for one mix until :meth:`unclaim`: of two at once, each would lose the other's update."""
        if self._claimed:
            raise InvalidArgumentError(
                "these residuals are in use by a mix under way: wait for its handle first, and use other residuals for "
                "each set of tensors."
            )
        self._claimed = True

    def unclaim(self) -> None:
        """End the reservation."""
        self._claimed = False

    def begin(self, x: Tensor, weight_sum: float = 1.0) -> None:
        """Start from values that all nodes hold.

        Args:
            x: the values, flat: this rank's shard, if the ranks of a node share the work.
            weight_sum: the sum of this node's weights; 1, unless the graph is directed and not doubly stochastic.

        """
        public = x.detach().reshape(-1).to(torch.float32, copy=True)
        self._state = _State(public, public * weight_sum)

    def lend(self, numel: int, device: torch.device) -> tuple[_State, _State]:
        """Return the state, and memory for the next one, which replaces it when :meth:`commit` is called."""
        with torch.inference_mode(False):
            if self._state is None:
                self._state = _State(*torch.zeros(2, numel, device=device))
            if self._state.public.numel() != numel or self._state.public.device != device:
                raise InvalidArgumentError(
                    f"these residuals are of {self._state.public.numel()} elements on {self._state.public.device}, but "
                    f"{numel} on {device} are to be mixed: use other residuals for each set of tensors."
                )
            if self._next is None:
                self._next = _State(*torch.empty(2, numel, device=device))
        return self._state, self._next

    def commit(self) -> None:
        """Make the state of the last round the current one."""
        self._state, self._next = self._next, self._state

    def state_dict(self) -> dict[str, Tensor]:
        """Return ``public`` and ``public_sum``, not as copies; an empty dict before the first round."""
        return {} if self._state is None else self._state._asdict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a copy of this one."""
        self._state = _State(**{name: value.detach().clone() for name, value in state.items()}) if state else None
        self._next = None


def choose_gamma(compressor: Compressor, dims: Iterable[int], asked: float | None) -> float:
    """Return ``gamma`` for tensors of so many dims: the one asked for, or one that converges.

    A compressor that drops coefficients is biased. With a large ``gamma`` nodes move by differences that peers do not
    know yet, and diverge. ``gamma`` may be at most the share that is sent, or twice that share if the largest
    coefficients are sent first (measured: docs/decentralized.md). It depends on the compressor alone, so it is equal on
    ranks whose shards have different lengths.
    """
    plans = [compressor.plan(TensorSpec("any", _LARGE[dim > 1], torch.float32)) for dim in dims]
    _check_compressor(compressor, plans)
    share = min((_share_of(one) for one in plans), default=1.0)
    most = min((_most_gamma(one) for one in plans), default=1.0)
    if asked is not None and asked > most:
        raise InvalidArgumentError(
            f"gamma={asked:g} diverges with {compressor}, which sends a share of {share:.3g} and drops the rest: pass "
            f"at most gamma={most:.3g}, leave it out, or send everything, as dense(values='int8') does."
        )
    return min(share, most) if asked is None else asked


def _check_compressor(compressor: Compressor, plans: list[TensorPlan]) -> None:
    if any(one.variable_length for one in plans):
        raise CompressorError(
            f"{compressor} sends payloads of any length, but messages have a fixed length: give threshold a capacity, "
            f"or use top_k."
        )
    if any(one.values.format.magnitudes == 1 for one in plans):
        raise CompressorError(
            f"{compressor} sends one magnitude for a chunk: differences between nodes concentrate in few elements, and "
            f"mixing diverges on some graphs after hundreds of rounds. Use values='sign2' or 'int8'."
        )


def _share_of(plan: TensorPlan) -> float:
    """Return the share of a tensor's coefficients that is sent."""
    return min(1.0, plan.entries / (plan.chunks * plan.chunk_numel))


def _most_gamma(plan: TensorPlan) -> float:
    """Return the largest ``gamma`` that is known to converge."""
    share, drawn = _share_of(plan), plan.selection.rule.sample_key is not None
    most = 1.0 if share == 1.0 else share * (1.0 if drawn else 2.0)
    magnitudes = plan.values.format.magnitudes
    coarse = magnitudes is not None and magnitudes <= _FEW_MAGNITUDES
    return min(most, _MOST_BIASED_GAMMA if coarse or share < 1.0 else 1.0)


class PushSum:
    """The push-sum weight of this node, kept from round to round; the weights of all nodes sum to their number.

    For directed graphs, where nodes may receive more or less weight than they send. Tensors are stored de-biased, as
    ``z = x / weight``. A node sends ``z`` with its weight, and receivers multiply the two. Rounds preserve, and
    converge to, the mean of ``weight * z``.

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
