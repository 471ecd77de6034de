"""A backward pass seen from a hook: what is reduced leaves at once, what all nodes sent is written at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.autograd import Variable

if TYPE_CHECKING:
    from torch import Tensor

    from flexdemo.attachment import Attachment
    from flexdemo.lots import Lot

__all__ = ["BackwardPass"]


class BackwardPass:
    """The gradients of one backward pass that are under way between nodes."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._is_running = False
        self._leaving: dict[Lot, list[Tensor]] = {}

    def send(self, lot: Lot, gradients: list[Tensor], *, at_once: bool) -> None:
        """Exchange gradients in place: until this returns if ``at_once``, else until the backward pass ends."""
        if not self._is_running:
            self._is_running = True
            # Called when the whole backward pass is done, also from within FSDP's own such callback.
            Variable._execution_engine.queue_callback(self._end)
        self._attachment.start(lot, gradients)
        self._leaving[lot] = gradients
        if at_once:
            self._receive()

    def _end(self) -> None:
        self._is_running = False
        self._receive()
        self._attachment.step += 1

    def _receive(self) -> None:
        """Write what was received over what was sent; zeros if all ranks skip it."""
        leaving, self._leaving = self._leaving, {}
        if not leaving:
            return
        received = self._attachment.exchange.finish()
        if received is None:
            for gradients in leaving.values():
                for gradient in gradients:
                    gradient.zero_()
            return
        for lot, averages in received:
            for gradient, average in zip(leaving[lot], averages, strict=True):
                gradient.copy_(average)
