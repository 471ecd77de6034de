"""The Protocol of kernel sets: one call encodes a bucket, one verifies and one decodes the buffers of all senders.

Kernels know plans, layouts and memory, and nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol, SupportsInt

import torch
from torch import Tensor

from flexcomm.kernels.layout import BufferPlan, Region

Tensors = Sequence[Tensor]
States = Sequence[Tensor] | None
"""What was not sent of each tensor of a bucket; None: nothing is kept."""

Average = Literal["nodes", "contributors"]
"""Divide a sum by the number of payloads, or by the number of those that sent the coefficient."""

LARGEST_MAGNITUDE = 2.0**100
"""Elements stay below this. A transform of up to 2**24 of them multiplies by at most 2**12, so no sum overflows."""


class Problem(IntEnum):
    """What is wrong with a bucket, or with a buffer."""

    NONE = 0
    NONFINITE = 1
    """encode: a tensor holds NaN, infinity or a magnitude too large; verify: a sender flagged that it had one"""
    STATE = 2
    """encode: a state holds NaN or infinity"""
    HEADER = 3
    """verify: the header or the checksum is not the expected one"""
    COUNTS = 4
    """verify: a chunk is said to hold more entries than it can, or a payload more than its plan allows"""
    LENGTH = 5
    """verify: payloads of variable length do not end where the buffer does"""
    ENTRIES = 6
    """verify: a buffer does not hold as many entries as its header says"""
    INDEX = 7
    """verify: indices do not increase, leave the chunk, or are not as many as counted"""
    SCALE = 8
    """verify: a scale is negative or not finite"""
    VALUE = 9
    """verify: a value is not finite"""


class Status(NamedTuple):
    """The outcome of a kernel call, which is one number: the first problem, and where it is."""

    problem: Problem = Problem.NONE
    sender: int = 0
    tensor: int = 0

    @property
    def word(self) -> int:
        """The number; 0 if nothing is wrong."""
        return self.sender << 40 | self.tensor << 8 | int(self.problem)

    @classmethod
    def of(cls, word: int) -> Status:
        """Return what a number says."""
        return cls(Problem(word & 0xFF), word >> 40, word >> 8 & 0xFFFFFFFF)


class DeviceStatus:
    """The status word of a call, in the device's memory. ``int()`` waits for it; if that is not 0, ``restore`` runs."""

    def __init__(self, word: Tensor, restore: Callable[[], None] | None = None) -> None:
        self.word = word
        self._restore = restore
        self._value: int | None = None

    def __int__(self) -> int:
        if self._value is None:
            self._value = int(self.word)
            if self._value and self._restore is not None:
                self._restore()
            self._restore = None
        return self._value


class StateUpdate(NamedTuple):
    """How a state takes in a tensor and gives off what is sent.

    ``decay * state + gain * coefficients`` is selected from; of what is sent, the share ``alpha`` is taken out.
    """

    decay: float = 1.0
    gain: float = 1.0
    alpha: float = 1.0


def are_in_place(states: States, states_out: States) -> bool:
    """Return whether states are updated where they are; empty ones, of tensors without chunks, all have one address."""
    pairs = zip(states or (), states_out or (), strict=False)
    return any(state.numel() > 0 and state.data_ptr() == out.data_ptr() for state, out in pairs)


EpilogueKind = Literal["store", "sign_step", "plain_step"]


class Epilogue(NamedTuple):
    """What decoding does with an average and an output.

    Steps are computed in float32, those of float64 in float64, product and difference rounded each, and then to the
    output's dtype.

    Args:
        kind: ``"store"`` writes the average. ``"sign_step"`` moves the output against its sign, ``keep * out - lr *
            sign(average)``, ``"plain_step"`` against the average itself, ``keep * out - average``.
        lr: the length of a step by the sign.
        keep: what weight decay leaves of the output.

    """

    kind: EpilogueKind = "store"
    lr: float = 0.0
    keep: float = 1.0


STORE = Epilogue()


def apply_epilogue_(out: Tensor, average: Tensor, epilogue: Epilogue) -> None:
    """Do with an average what an epilogue says; kernels do so while they decode.

    Args:
        out: the average is written there, or it takes a step.
        average: of the same shape.
        epilogue: what to do.

    Example:
        >>> import torch, flexcomm
        >>> param = torch.tensor([1.0, 2.0])
        >>> flexcomm.apply_epilogue_(param, torch.tensor([0.3, -4.0]), flexcomm.Epilogue("sign_step", lr=0.5))
        >>> param
        tensor([0.5000, 2.5000])

    """
    if epilogue.kind == "store":
        out.copy_(average)
    else:
        wide = torch.float64 if out.dtype is torch.float64 else torch.float32
        step = average.to(wide)
        step = step.sign().mul_(epilogue.lr) if epilogue.kind == "sign_step" else step
        out.copy_(out.to(wide).mul(epilogue.keep).sub_(step))


class BucketEncoder(Protocol):
    """One buffer that is filled again and again; all is prepared that follows from the plan and the buffer."""

    def encode_(
        self, tensors: Tensors, states: States, states_out: States, update: StateUpdate, *, step: int, sequence: int
    ) -> SupportsInt:
        """Fill the buffer with header and payloads, and move what they hold out of the states.

        Keeps ``decay * state + gain * coefficients == alpha * decoded + state_out``. On a problem, the buffer has the
        header that :meth:`mark_nonfinite_` writes, and ``states`` are as before: bit for bit, or, where they are
        updated in place and the problem was found on the way, as :meth:`rollback_` restores them. ``states_out`` apart
        from them then hold nothing of use.

        Args:
            tensors: one for each of the plan's specs.
            states: what was not sent before, contiguous float32 of ``plan.state_shape`` each; None: nothing is kept.
            states_out: what is not sent now goes there; may be ``states``.
            update: how both are related.
            step: shared selections depend on it, and it is part of the header, as ``sequence`` is.
            sequence: the number of the bucket since the world began.

        Returns:
            The status word: a number, or a :class:`DeviceStatus`. If that is not 0, states that were updated in place
            are restored when it is read.

        """

    def rollback_(self, tensors: Tensors, states: Tensors, update: StateUpdate, *, step: int) -> None:
        """Restore the states from before the last :meth:`encode_`, which updated them in place.

        ``m = (m' + alpha * sent - gain * coefficients) / decay``, from the buffer as it was filled and tensors as they
        were: equal in all kernel sets, and off by at most ``2**-21 / decay * (|m| + |m'| + |gain * coefficients|)``.
        The decay must not be 0.
        """

    def mark_nonfinite_(self, *, step: int, sequence: int) -> None:
        """Fill the buffer with a header that says that this sender has nonfinite values, and nothing else."""


class BucketDecoder(Protocol):
    """The buffers of several senders, in memory that is filled again and again."""

    def verify(self, *, step: int, sequence: int) -> SupportsInt:
        """Return a status word: that of the first header that is wrong, else of the first sender with the flag.

        Else that of the first sender with a problem: of counts and lengths, or else of the first payload that is wrong,
        by tensor and kind of problem.
        """

    def decode_(self, outputs: Tensors, *, step: int, average: Average, epilogue: Epilogue = STORE) -> None:
        """Average the buffers, added in the order of senders, and do with ``outputs`` what the epilogue says.

        They were verified, or they hold no indices and are known to be sound, as sums are.
        """


class Kernels(Protocol):
    """The loops over chunks, for one kind of device. Words are int32, contiguous; tensors of any floating dtype.

    Every set computes the same bits: :func:`flexcomm.testing.check_kernels` compares one with the reference.
    """

    @property
    def name(self) -> str:
        """Return the name people force it by."""

    def encoder(self, plan: BufferPlan, words: Tensor) -> BucketEncoder:
        """Return the encoder of a buffer of ``plan.nwords`` words."""

    def decoder(
        self,
        plan: BufferPlan,
        words: Tensor,
        regions: Sequence[Region],
        decoded_as: BufferPlan | None = None,
        summed: int = 1,
    ) -> BucketDecoder:
        """Return the decoder of the buffers that lie in ``words`` at ``regions``.

        ``decoded_as`` is a plan with the same payloads that says what to decode them to, if not ``plan`` itself.
        Every buffer is the sum of those of ``summed`` nodes, by which its average is divided, too.
        """

    def mix_(self, x: Tensor, self_weight: float, others: Tensors, weights: Sequence[float], out: Tensor) -> Tensor:
        """Fill ``out``, which may be ``x``, with ``self_weight * x + sum of weights[j] * others[j]``.

        Return the squared distance ``|out - x|^2`` from x as it was: a float64 scalar on its device, by the same pass.

        All are flat, contiguous, of one dtype and length; ``out`` may also be one of ``others``, but not overlap them
        otherwise. Terms are added in that order. Products and sums are rounded each, in float32 or, for float64, in
        float64, and the total once more to the dtype: every set gives the same ``out``, except that a NaN may be any
        NaN. What has weight 0 is left out, so that nothing it holds matters to ``out``; without any term ``out`` is 0.
        The distance is that of the rounded ``out``, added up in float64 in any order: sets, and numbers of threads,
        agree on it to rounding.
        """
