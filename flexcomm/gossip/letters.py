"""Letters: what nodes send each other in a phase, each behind a line that says which trip it belongs to.

A node that is in another call, or at another step, is found by that line, before anything of its letter is used.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import torch

from flexcomm.errors import ConfigMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm.transport import Transport

__all__ = ["LINE_NBYTES", "Heard", "Line", "swap"]

_WORDS = 4
LINE_NBYTES = _WORDS * 8
_INT64 = 1 << 63


class Line(NamedTuple):
    """Which call and schedule (``digest``), which step, the how-manieth trip; and the sender's push-sum weight."""

    digest: int
    step: int
    sequence: int
    weight: float

    def written(self, device: torch.device) -> Tensor:
        bits = struct.unpack("<q", struct.pack("<d", self.weight))[0]
        numbers = [self.digest, self.step, self.sequence, bits]
        return torch.tensor([(number + _INT64) % (2 * _INT64) - _INT64 for number in numbers], device=device)

    def check(self, said: Sequence[int], sender: int) -> float:
        """Return the weight that a sender wrote, if all else is as it is here."""
        digest, step, sequence, bits = said
        differing = {
            "step": (step, self.step),
            "number of mixes so far": (sequence, self.sequence),
            "tensors, schedule or settings (by their digest)": (digest, self.digest),
        }
        for name, (theirs, ours) in differing.items():
            if (theirs - ours) % (2 * _INT64):
                raise ConfigMismatchError(
                    f"nodes disagree on what they mix, and nothing was changed: node {sender} sent {name} {theirs}, "
                    f"here it is {ours}. Mix the same tensors at the same steps, in the same order, on every node."
                )
        weight: float = struct.unpack("<d", struct.pack("<q", bits))[0]
        return weight


class Heard(NamedTuple):
    """What came of each node heard, and its push-sum weight."""

    bodies: list[Tensor]
    weights: list[float]


def swap(
    inter: Transport, line: Line, sent: Sequence[tuple[int, Tensor]], heard: Sequence[tuple[int, Tensor]]
) -> Heard:
    """Send a letter to each of some nodes, and return when one has come from each of others, into the tensors given.

    Lines go first: a body of another length than expected would end the process, not raise.
    """
    device = next((body.device for _, body in (*sent, *heard)), torch.device("cpu"))
    mine = line.written(device)
    lines = [torch.empty_like(mine) for _ in heard]
    senders = [peer for peer, _ in heard]
    inter.send_recv([(peer, mine) for peer, _ in sent], list(zip(senders, lines, strict=True))).wait()
    weights = [line.check(first.tolist(), peer) for peer, first in zip(senders, lines, strict=True)]
    inter.send_recv(sent, heard).wait()
    return Heard([body for _, body in heard], weights)
