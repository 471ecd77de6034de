"""Accumulated Adam: parameters move at every step, moments once in a window, by the mean gradient of the window."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from flexcomm import InvalidArgumentError
from flexdemo.parameters import Group, gradient_of, local

Tensors = tuple[Tensor, ...]
_Row = tuple[Tensor, ...]

_CPU_BATCH_NUMEL = 1 << 15
"""Elements a thread works on at once, so that all that is read and written of them stays in its cache: a step of 23 M
parameters took 0.6 of the time (one thread of a Xeon). Of fewer, torch does not give a part to another thread."""
_BATCH_NUMEL = 1 << 24
"""Elsewhere: temporaries take two or three numbers for each, and not for each of the model."""


class AccumAdam(Optimizer):
    """Adam whose moments count as for batches ``window`` times as large (AccumAdam, arXiv 2410.11998).

    A step moves parameters by the moments as they would be with the gradient at hand; what is kept of them advances
    once in a window, by the mean gradient of its steps. With ``window=1`` that is Adam, or AdamW where weight decay is
    ``decoupled``. The published listing decays the kept second moment with the first one's beta, which is a misprint.

    Windows are counted parameter by parameter, by the gradients it had: one without a gradient stays as it is, and so
    does its state. The state is Adam's, and ``accumulated``, the part of the mean that is known, where the window is
    above 1.

    Args:
        params: parameters or parameter groups, which may differ in all settings.
        lr: the learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: of parameters if ``decoupled``, else added to gradients.
        window: steps whose gradients count as one.
        decoupled: whether weight decay is AdamW's or Adam's.

    Example:
        >>> import torch, flexdemo
        >>> param = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = flexdemo.AccumAdam([param], lr=0.5, window=4)
        >>> param.grad = torch.ones(2)
        >>> optimizer.step()
        >>> param.data
        tensor([-0.5000, -0.5000])

    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        window: int = 1,
        decoupled: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "window": window,
            "decoupled": decoupled,
        }
        _check_settings(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        _check_settings(self.defaults | param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient, and count the step for it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # A checkpoint of torch's own Adam knows of no window.
            settings = self.defaults | group | {"lr": float(group["lr"])}
            for (device, _, count), params in self._alike(group["params"]).items():
                rows = [self._open(param, settings["window"]) for param in params]
                torch._foreach_add_([self.state[param]["step"] for param in params], 1)
                for batch in _cut(rows, _batch_numel(device)):
                    _advance(batch, count + 1, settings)
        return loss

    def _alike(self, params: list[Tensor]) -> dict[tuple[torch.device, torch.dtype, int], list[Tensor]]:
        """Return the parameters that have a gradient, by device, dtype and the number of steps behind them."""
        alike = defaultdict(list)
        for param in params:
            if param.grad is not None:
                count = int(self.state[param]["step"]) if self.state[param] else 0
                alike[param.device, param.dtype, count].append(param)
        return alike

    def _open(self, param: Tensor, window: int) -> _Row:
        """Return what this rank holds of a parameter and its state, which begins with zeros."""
        state = self.state[param]
        if not state:
            # A float32 on the CPU, as torch has it.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        if window > 1 and "accumulated" not in state:
            state["accumulated"] = torch.zeros_like(param)
        # Where nothing is accumulated nobody looks at it.
        kept = (state["exp_avg"], state["exp_avg_sq"], state.get("accumulated", state["exp_avg"]))
        return (local(param), gradient_of(param), *(local(one) for one in kept))


class _Batch(NamedTuple):
    """Parameters that move together, as tensors of this rank."""

    params: Tensors
    gradients: Tensors
    means: Tensors
    squares: Tensors
    accumulated: Tensors


def _advance(batch: _Batch, count: int, group: Group) -> None:
    """Take step number ``count`` of these parameters."""
    batch = _decayed(batch, group)
    if group["window"] == 1:
        _fold(batch, batch.gradients, group)
        _move(batch, batch.means, torch._foreach_sqrt(batch.squares), count, group)
        return
    torch._foreach_add_(batch.accumulated, batch.gradients, alpha=1.0 / group["window"])
    beta1, beta2 = group["betas"]
    roots = torch._foreach_mul(batch.squares, beta2)
    torch._foreach_addcmul_(roots, batch.gradients, batch.gradients, value=1.0 - beta2)
    torch._foreach_sqrt_(roots)
    _move(batch, torch._foreach_lerp(batch.means, batch.gradients, 1.0 - beta1), roots, count, group)
    if count % group["window"] == 0:
        _fold(batch, batch.accumulated, group)
        torch._foreach_zero_(batch.accumulated)


def _decayed(batch: _Batch, group: Group) -> _Batch:
    """Return the batch with weights decayed or, if that is not decoupled, with gradients that decay them."""
    if not group["weight_decay"]:
        return batch
    if group["decoupled"]:
        torch._foreach_mul_(batch.params, 1.0 - group["lr"] * group["weight_decay"])
        return batch
    return batch._replace(gradients=torch._foreach_add(batch.gradients, batch.params, alpha=group["weight_decay"]))


def _fold(batch: _Batch, gradients: Tensors, group: Group) -> None:
    """Let the moments advance by gradients."""
    beta1, beta2 = group["betas"]
    torch._foreach_lerp_(batch.means, gradients, 1.0 - beta1)
    torch._foreach_mul_(batch.squares, beta2)
    torch._foreach_addcmul_(batch.squares, gradients, gradients, value=1.0 - beta2)


def _move(batch: _Batch, means: Tensors, roots: Tensors, count: int, group: Group) -> None:
    """Move parameters by mean and root of the mean square, which is overwritten; both began with zeros."""
    windows = -(-count // group["window"])
    beta1, beta2 = group["betas"]
    torch._foreach_div_(roots, math.sqrt(1.0 - beta2**windows))
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_addcdiv_(batch.params, means, roots, value=-group["lr"] / (1.0 - beta1**windows))


def _batch_numel(device: torch.device) -> int:
    return _CPU_BATCH_NUMEL * torch.get_num_threads() if device.type == "cpu" else _BATCH_NUMEL


def _cut(rows: list[_Row], most: int) -> Iterator[_Batch]:
    """Give rows in batches of about ``most`` elements; long ones in pieces, if their memory allows it."""
    batch: list[_Row] = []
    numel = 0
    for one_slice in (one_slice for row in rows for one_slice in _slices(row, most)):
        if batch and numel + one_slice[0].numel() > most:
            yield _Batch(*zip(*batch, strict=True))
            batch, numel = [], 0
        batch.append(one_slice)
        numel += one_slice[0].numel()
    if batch:
        yield _Batch(*zip(*batch, strict=True))


def _slices(row: _Row, most: int) -> Iterable[_Row]:
    if row[0].numel() <= most or not all(one.is_contiguous() for one in row):
        return [row]
    return zip(*(torch.split(one.view(-1), most) for one in row), strict=True)


def _check_settings(group: Group) -> None:
    """Raise unless the settings of a group make sense."""
    rules = {
        "lr": (float(group["lr"]) >= 0, "at least 0"),
        "betas": (all(0 <= beta < 1 for beta in group["betas"]) and len(group["betas"]) == 2, "two from 0 to below 1"),
        "eps": (group["eps"] >= 0, "at least 0"),
        "weight_decay": (group["weight_decay"] >= 0, "at least 0"),
        "window": (isinstance(group["window"], int) and group["window"] >= 1, "a whole number, at least 1"),
    }
    wrong = [
        f"{name} is {group[name]!r}, but must be {needed}" for name, (allowed, needed) in rules.items() if not allowed
    ]
    if wrong:
        raise InvalidArgumentError(f"{'; '.join(wrong)}.")
