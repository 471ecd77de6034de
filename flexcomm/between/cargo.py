"""What one bucket carries between nodes, and what its carriers wait for."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import torch

from flexcomm.bucket import decode_payloads_
from flexcomm.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from flexcomm.bucket import BucketPlan, Incoming, Opened, Outgoing
    from flexcomm.kernels import Average, Kernels, Momentum
    from flexcomm.pieces import Piece
    from flexcomm.stats import SyncRecord
    from flexcomm.transport import Handle, Transport

__all__ = ["Cargo", "Leg", "Memory", "Pending"]


T = TypeVar("T")


class Pending(NamedTuple):
    """A collective under way, and whether the caller may be left to himself now, to compute."""

    handle: Handle[Any]
    level: Literal["intra", "inter"]
    sent_bytes: int
    received_bytes: int
    may_rest: bool = True


Leg = Generator[Pending, Any, list[str]]


class Memory:
    """What the calls of one route use again and again, one after the other: tensors, and views of them.

    All of it follows from the route and the world, so it is made when first asked for and never changes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, object] = {}

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """Return what was made under that name."""
        if name not in self._kept:
            # Not as inference tensors, which no later call could write.
            with torch.inference_mode(False):
                self._kept[name] = make()
        return cast("T", self._kept[name])  # a name stands for one kind of thing

    def allocate(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return a tensor on the route's device, holding anything."""
        return torch.empty(shape, dtype=dtype, device=self._device)


@dataclass
class Cargo:
    """What one bucket carries between nodes, and by what means. ``unfit`` says why it cannot be sent, if it cannot."""

    pieces: tuple[Piece, ...]
    plan: BucketPlan
    inputs: list[Tensor]
    momenta: list[Momentum]
    outputs: list[Tensor]
    step: int
    sequence: int
    average: Average
    kernels: Kernels
    inter: Transport
    senders: list[str]
    memory: Memory
    record: SyncRecord
    unfit: str = ""

    @property
    def nodes(self) -> int:
        return self.inter.size

    def encode_(self, outgoing: Outgoing, inputs: Sequence[Tensor], momenta: Sequence[Momentum]) -> int:
        """Fill the buffer; if there is nothing fit to be sent, with a mark that says so. Return its bytes."""
        with self.record.time("encode"):
            if not self.unfit:
                try:
                    return outgoing.encode_(inputs, momenta, step=self.step, sequence=self.sequence)
                except NonFiniteError as error:
                    self.unfit = str(error)
            return outgoing.flag_(step=self.step, sequence=self.sequence)

    def open(self, incoming: Incoming) -> Opened:
        """Check buffers that came."""
        return incoming.open(step=self.step, sequence=self.sequence)

    def decode_(self, meaning: BucketPlan, opened: Opened, outputs: Sequence[Tensor], average: Average) -> None:
        """Fill the outputs with the average of what was opened."""
        decode_payloads_(meaning, opened, outputs, step=self.step, average=average)
