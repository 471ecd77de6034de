"""What one bucket carries between nodes, and what its carriers wait for."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from flexcomm.bucket import decode_payloads_, encode_bucket_, flag_bucket_, open_bucket
from flexcomm.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm.bucket import BucketPlan, Opened
    from flexcomm.kernels import Average, Kernels, Momentum
    from flexcomm.pieces import Piece
    from flexcomm.stats import SyncRecord
    from flexcomm.transport import Handle, Transport
    from flexcomm.wire import Region

__all__ = ["Cargo", "Leg", "Memory", "Pending"]


class Pending(NamedTuple):
    """A collective under way, and whether the caller may be left to himself now, to compute."""

    handle: Handle[Any]
    level: Literal["intra", "inter"]
    sent_bytes: int
    received_bytes: int
    may_rest: bool = True


Leg = Generator[Pending, Any, list[str]]


class Memory:
    """Tensors used again and again: allocated when first asked for, and anew only if asked for another kind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return the tensor of that name; what it holds is left over from before."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._tensors[name] = tensor
        return tensor


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

    def encode_(
        self, plan: BucketPlan, inputs: Sequence[Tensor], buffer: Tensor, momenta: Sequence[Momentum] | None = None
    ) -> int:
        """Fill the buffer; if there is nothing fit to be sent, with a mark that says so. Return its bytes."""
        step, sequence, kernels = self.step, self.sequence, self.kernels
        with self.record.time("encode"):
            if not self.unfit:
                try:
                    return encode_bucket_(
                        plan, inputs, buffer, step=step, sequence=sequence, kernels=kernels, momenta=momenta
                    )
                except NonFiniteError as error:
                    self.unfit = str(error)
            return flag_bucket_(plan, buffer, step=step, sequence=sequence, kernels=kernels)

    def open(self, plan: BucketPlan, gathered: Tensor, regions: Sequence[Region]) -> Opened:
        """Check buffers that came."""
        return open_bucket(plan, gathered, regions, step=self.step, sequence=self.sequence, kernels=self.kernels)

    def decode_(self, plan: BucketPlan, opened: Opened, outputs: Sequence[Tensor], average: Average) -> None:
        """Fill the outputs with the average of what was opened."""
        decode_payloads_(plan, opened, outputs, step=self.step, kernels=self.kernels, average=average)
