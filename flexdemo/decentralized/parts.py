"""Parts: parameters of one dtype that are mixed together, where they lie, and the mix that is under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from flexcomm import InvalidArgumentError, MixResiduals, PushSum, mix, start_mix
from flexcomm.gossip import complete, plan_mix, round_of
from flexdemo.parameters import local
from flexdemo.torch_private.autograd import version_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from flexcomm import Compressor, MixHandle, World
    from flexcomm.gossip import ScheduleLike
    from flexdemo.gradients import Bucket

__all__ = ["MixTerms", "Part", "cut_into_parts"]


@dataclass(frozen=True)
class MixTerms:
    """How parameters are mixed: by which schedule, how far, and what is sent of them if not everything."""

    schedule: ScheduleLike
    gamma: float | None = None
    compressor: Compressor | None = None


class Part:
    """Parameters of one dtype and device.

    Whole, contiguous ones are laid one behind the other, and sent from where they lie: a parameter does not change
    while it is mixed. Others, such as FSDP's shards, are copied when a mix starts.
    """

    def __init__(
        self, params: list[Parameter], names: list[str], world: World, terms: MixTerms, *, shards: bool, lane: str
    ) -> None:
        self.params, self.names, self.shards, self._lane = params, names, shards, lane
        self.moved: Tensor | None = None
        self._world, self._terms = world, terms
        self._tensors = [local(param) for param in params]
        if not shards and len(params) > 1 and all(tensor.is_contiguous() for tensor in self._tensors):
            self._tensors = [_lay_together(params)]
        self._places = [local(param).data_ptr() for param in params]
        self.memory = None if terms.compressor is None else MixResiduals()
        self.begin_memory()
        self.push_sum = None if terms.schedule.is_doubly_stochastic else PushSum()
        self._handle: MixHandle[list[Tensor]] | None = None
        self._versions: list[int] = []
        # Here, where all ranks come in one order, as they may not in a backward pass.
        plan_mix(
            self._tensors,
            terms.schedule,
            world=world,
            sharded=shards,
            gamma=terms.gamma,
            has_push_sum=self.push_sum is not None,
            compressor=terms.compressor,
            has_residuals=self.memory is not None,
            communicator=lane,
        )

    def begin_memory(self) -> None:
        """Remember, if anything is, what all replicas hold now: this rank's share of it, if ranks share the work."""
        if self.memory is None:
            return
        topology = self._world.topology
        flat = torch.cat([x.reshape(-1) for x in self._tensors])
        if not self.shards and topology.local_size > 1:
            numel = -(-flat.numel() // topology.local_size)
            flat = torch.nn.functional.pad(flat, (0, numel * topology.local_size - flat.numel()))
            flat = flat[topology.local_rank * numel :][:numel]
        self.memory.begin(flat, round_of(self._terms.schedule.phase(0), topology.node).weight_sum)

    @property
    def tensors(self) -> list[Tensor]:
        """What is mixed: all elements of this rank's parameters."""
        return self._tensors

    @property
    def is_under_way(self) -> bool:
        return self._handle is not None

    def start(self, step: int, terms: MixTerms) -> None:
        """Start to mix what the parameters are now."""
        self._check_places()
        self._versions = [version_of(param) for param in self.params]
        options = self._options(terms)
        options["out"] = self._tensors
        self._handle = start_mix(self._tensors, terms.schedule, step, **options)

    def _options(self, terms: MixTerms) -> dict[str, Any]:
        return {
            "world": self._world,
            "sharded": self.shards,
            "gamma": terms.gamma,
            "push_sum": self.push_sum,
            "compressor": terms.compressor,
            "residuals": self.memory if terms.compressor is not None else None,
            "communicator": self._lane,
        }

    def finish(self) -> None:
        """Let the parameters become what they were mixed to, if they are being mixed."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        self._check_unchanged()
        self.moved = handle.wait().squared_distance

    def let_arrive(self) -> None:
        """Wait until nothing is read from the parameters any longer; what came is mixed in later."""
        if self._handle is not None:
            self._handle.wait_received()

    def drop(self) -> None:
        """Let what is under way arrive, and do nothing with it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.cancel()

    def mean(self) -> tuple[list[Tensor], Tensor]:
        """Return the mean over all nodes and ranks, and this rank's squared distance from it. All ranks call it."""
        everybody = complete(self._world.topology.nodes)
        options = self._options(MixTerms(everybody))
        options["push_sum"] = None if self.push_sum is None else PushSum(self.push_sum.weight)
        mixed = mix(self._tensors, everybody, 0, **options)
        return mixed.tensors, mixed.squared_distance

    def write(self, values: list[Tensor]) -> None:
        """Give the parameters these values."""
        torch._foreach_copy_(self._tensors, values)
        self.accept_changes()

    def accept_changes(self) -> None:
        """Take parameters for unchanged since they left: what was done to them was undone, and nobody read them."""
        self._versions = [version_of(param) for param in self.params]

    def _check_places(self) -> None:
        if [local(param).data_ptr() for param in self.params] != self._places:
            raise InvalidArgumentError(
                f"parameters such as {self.names[0]} were moved or replaced after this optimizer was made: move the "
                f"model first, then make the optimizer."
            )

    def _check_unchanged(self) -> None:
        changed = [
            name
            for name, param, version in zip(self.names, self.params, self._versions, strict=True)
            if version_of(param) != version
        ]
        if changed:
            raise InvalidArgumentError(
                f"{', '.join(changed[:4])} changed while being mixed: peers know other values than this rank has. "
                f"Call optimizer.restart() on all ranks before you change parameters, or use order='step-then-mix', "
                f"where nothing is under way between steps."
            )


def _lay_together(params: list[Parameter]) -> Tensor:
    """Return one tensor in which the parameters lie from now on."""
    flat = torch.cat([param.detach().reshape(-1) for param in params])
    places = torch.split(flat, [param.numel() for param in params])
    for param, place in zip(params, places, strict=True):
        param.data = place.view(param.shape)
    return flat


@dataclass(eq=False)
class _Collected:
    params: list[Parameter] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def cut_into_parts(bucket: Bucket, world: World, terms: MixTerms, lane: str) -> list[Part]:
    """Return a bucket's parameters by dtype."""
    by_dtype: dict[torch.dtype, _Collected] = {}
    for param, name in zip(bucket.params, bucket.names, strict=True):
        here = by_dtype.setdefault(param.dtype, _Collected())
        here.params.append(param)
        here.names.append(name)
    return [Part(one.params, one.names, world, terms, shards=bucket.averaged, lane=lane) for one in by_dtype.values()]
