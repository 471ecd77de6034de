"""Messages: the payloads that nodes send each other in a round, each behind a header.

The header identifies the call, so a node that is in another call, or at another step, is found before any of its
payload is used.
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

__all__ = ["HEADER_NBYTES", "MessageHeader", "ReceivedMessages", "send_recv_messages"]

HEADER_NBYTES = 4 * torch.int64.itemsize
_INT64 = 1 << 63


class MessageHeader(NamedTuple):
    """The digest of the plan, the step, the number of the call, and the sender's push-sum weight."""

    digest: int
    step: int
    sequence: int
    push_weight: float

    def to_tensor(self, device: torch.device) -> Tensor:
        """Return the header as four int64 words."""
        bits = struct.unpack("<q", struct.pack("<d", self.push_weight))[0]
        words = [self.digest, self.step, self.sequence, bits]
        return torch.tensor([(word + _INT64) % (2 * _INT64) - _INT64 for word in words], device=device)

    def check(self, words: Sequence[int], sender: int) -> float:
        """Return the push-sum weight in a received header. Raise if any other field differs from this one."""
        digest, step, sequence, bits = words
        fields = {
            "step": (step, self.step),
            "number of mixes so far": (sequence, self.sequence),
            "tensors, schedule or settings (by their digest)": (digest, self.digest),
        }
        for name, (theirs, ours) in fields.items():
            if (theirs - ours) % (2 * _INT64):
                raise ConfigMismatchError(
                    f"nodes disagree on what they mix, and nothing was changed: node {sender} sent {name} {theirs}, "
                    f"here it is {ours}. Mix the same tensors at the same steps, in the same order, on every node."
                )
        push_weight: float = struct.unpack("<d", struct.pack("<q", bits))[0]
        return push_weight


class ReceivedMessages(NamedTuple):
    """The payload and the push-sum weight of every sender, in the order in which senders were given."""

    payloads: list[Tensor]
    push_weights: list[float]


def send_recv_messages(
    inter: Transport,
    header: MessageHeader,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
) -> ReceivedMessages:
    """Send a message to each node of ``sends`` and receive one from each of ``receives``, into the tensors given.

    Headers travel first: a payload of another length than expected would end the process instead of raising.
    """
    device = next((payload.device for _, payload in (*sends, *receives)), torch.device("cpu"))
    own = header.to_tensor(device)
    headers = [torch.empty_like(own) for _ in receives]
    senders = [peer for peer, _ in receives]
    inter.send_recv([(peer, own) for peer, _ in sends], list(zip(senders, headers, strict=True))).wait()
    push_weights = [header.check(words.tolist(), peer) for peer, words in zip(senders, headers, strict=True)]
    inter.send_recv(sends, receives).wait()
    return ReceivedMessages([payload for _, payload in receives], push_weights)
