"""A backward pass seen from a hook: what is reduced leaves at once, what all nodes sent is written at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexcomm import FlexcommError, TransportError
from flexdemo.torch_private.autograd import queue_callback

if TYPE_CHECKING:
    from torch import Tensor

    from flexdemo.hook_handle import HookHandle
    from flexdemo.lots import Lot

__all__ = ["BackwardPass"]


class BackwardPass:
    """The gradients of one backward pass that are under way between nodes.

    What goes wrong is raised when the pass ends: FSDP does not survive an exception in the middle of it.
    """

    def __init__(self, handle: HookHandle) -> None:
        self._handle = handle
        self._has_sent = False
        self._failure: FlexcommError | None = None
        self._leaving: dict[Lot, list[Tensor]] = {}

    def send(self, lot: Lot, gradients: list[Tensor], *, at_once: bool) -> None:
        """Exchange gradients in place: until this returns if ``at_once``, else until the backward pass ends."""
        # With every send: a pass that died took its callbacks along, and left what was under way.
        queue_callback(self._end)
        if lot in self._leaving:
            self._handle.exchange.abandon()
            self._leaving = {}
        self._has_sent = True
        self._handle.start(lot, gradients)
        self._leaving[lot] = gradients
        if at_once:
            self._receive()

    def _end(self) -> None:
        if not self._has_sent:
            return
        self._receive()
        self._has_sent = False
        self._handle.step += 1
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _receive(self) -> None:
        """Write what was received over what was sent; zeros if all ranks skip it, or if it failed."""
        leaving, self._leaving = self._leaving, {}
        if not leaving:
            return
        received = None
        try:
            received = self._handle.exchange.finish()
        except TransportError:
            raise
        except FlexcommError as failure:
            self._failure = self._failure or failure
        if received is None:
            for gradients in leaving.values():
                for gradient in gradients:
                    gradient.zero_()
            return
        for lot, averages in received:
            for gradient, average in zip(leaving[lot], averages, strict=True):
                gradient.copy_(average)
