"""Readiness: which gradients a backward pass has made, counted lot by lot."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from torch.distributed.fsdp import FlatParameter

from flexcomm import InvalidArgumentError
from flexdemo.parameters import local
from flexdemo.torch_private.autograd import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from flexdemo.lots import Lot

__all__ = ["Readiness"]


class Readiness:
    """Launches lots, always in the same order, each when all its gradients are there and the ones before are launched.

    All ranks must start collectives in one order, but gradients come in any, and some never. What is not launched by
    the end of the backward pass is launched by :meth:`launch_rest`.
    """

    def __init__(self, launch: Callable[[Lot], None]) -> None:
        self._launch = launch
        self._lots: list[Lot] = []
        self._lot_of: dict[Tensor, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._paused = False
        self.reset()

    def watch(self, lots: list[Lot], *, early: bool) -> None:
        """Count these lots' gradients from now on; without ``early``, wait for :meth:`launch_rest`."""
        for hook in self._hooks:
            hook.remove()
        known, self._lots = self._lots, list(lots)
        self._lot_of = {param: number for number, lot in enumerate(lots) for param in lot.params}
        # A flat parameter of FSDP1 holds the whole unit's gradient when its hooks run.
        watched = [param for param in self._lot_of if early and not isinstance(param, FlatParameter)]
        note = WeakMethod(self._note)
        self._hooks = [param.register_post_accumulate_grad_hook(partial(_note_if_alive, note)) for param in watched]  # type: ignore[no-untyped-call]
        if self._lots[: len(known)] == known:
            # Lots joined, perhaps in the middle of an iteration: what was launched stays launched.
            self._missing += [len(lot.params) for lot in self._lots[len(known) :]]
        else:
            self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self._versions: dict[Tensor, tuple[int, int]] = {}
        self._missing = [len(lot.params) for lot in self._lots]
        self._launched = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing: gradients are still being accumulated."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def has_launched(self) -> bool:
        """Whether some lots of this iteration are on their way, and others may not be."""
        return self._launched > 0

    def launch_rest(self) -> None:
        """Launch what was not, whether or not its gradients are there."""
        while self._launched < len(self._lots):
            self._launch_next()

    def check_unchanged(self) -> None:
        """Raise if a gradient is no longer what was launched."""
        for param, version in self._versions.items():
            if self._lot_of[param] >= self._launched:
                continue
            if param.grad is None or _stamp(param.grad) != version:
                raise InvalidArgumentError(
                    "a gradient was changed after its exchange had begun. With overlap=True, or 'backward', gradients "
                    "leave during backward(): use overlap=False, or 'step', to clip or unscale them, and no_sync() to "
                    "accumulate them."
                )

    def _note(self, param: Tensor) -> None:
        if self._paused or param.grad is None:
            return
        if param in self._versions:
            raise InvalidArgumentError(
                "backward() ran twice before step(), and gradients are on their way since the first. Accumulate in "
                "`with optimizer.no_sync():` and leave it for the last backward(), or use overlap=False, or 'step'."
            )
        self._versions[param] = _stamp(param.grad)
        self._missing[self._lot_of[param]] -= 1
        while self._launched < len(self._lots) and self._missing[self._launched] == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        self._launched += 1
        self._launch(self._lots[self._launched - 1])


def _note_if_alive(note: WeakMethod[Any], param: Tensor) -> None:
    """Count a gradient; none for an optimizer that nobody holds any more but its own hooks."""
    alive = note()
    if alive is not None:
        alive(param)


def _stamp(gradient: Tensor) -> tuple[int, int]:
    """Return where a gradient lies, and how often it was changed there."""
    return local(gradient).data_ptr(), version_of(local(gradient))
