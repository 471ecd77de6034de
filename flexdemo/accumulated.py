"""Accumulated Adam: parameters move at every step, moments once in a window, by the mean gradient of the window."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from flexdemo.parameters import AT_LEAST_0, COUNT, Group, Rule, check_settings, gradient_of, local, move_steps_to_host_

_Row = tuple[Tensor, ...]
"""What this rank holds of a parameter, its gradient, its two moments, and the accumulated part of its mean gradient."""

_CPU_BATCH_NUMEL = 1 << 15
"""Elements a thread works on at once, so that all that is read and written of them stays in its cache: a step of 23 M
parameters took 0.6 of the time (one thread of a Xeon). Of fewer, torch does not give a part to another thread."""
_BATCH_NUMEL = 1 << 24
"""Elsewhere: temporaries take two or three numbers for each, and not for each of the model."""


_RULES: dict[str, Rule] = {
    "lr": AT_LEAST_0,
    "betas": (lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "two from 0 to below 1"),
    "eps": AT_LEAST_0,
    "weight_decay": AT_LEAST_0,
    "window": COUNT,
}


class AccumAdam(Optimizer):
    """Adam whose moments count as for batches ``window`` times as large (AccumAdam, arXiv 2410.11998).

    A step moves parameters by the moments as they would be with the gradient at hand; what is kept of them advances
    once in a window, by the mean gradient of its steps. ``window=1`` is Adam, or AdamW if ``decoupled``. (The published
    listing decays the kept second moment by the first one's beta, a misprint.) A parameter's steps are those in which
    it has a gradient. Its state is Adam's and, if ``window`` is above 1, ``accumulated``, the known part of the mean.

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
        adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults = {**adam, "window": window, "decoupled": decoupled}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        check_settings(self.defaults | param_group, _RULES)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        move_steps_to_host_(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient, and count the step for it."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            # A checkpoint of torch's own Adam knows of no window.
            settings = self.defaults | group | {"lr": float(group["lr"])}
            # Together by device, dtype and the number of steps behind them.
            alike: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    count = int(self.state[param]["step"]) if self.state[param] else 0
                    alike[param.device, param.dtype, count].append(param)
            for (device, _, count), params in alike.items():
                rows = [self._open(param, settings["window"]) for param in params]
                torch._foreach_add_([self.state[param]["step"] for param in params], 1)
                most = _CPU_BATCH_NUMEL * torch.get_num_threads() if device.type == "cpu" else _BATCH_NUMEL
                for batch in _batches(rows, most):
                    _advance(batch, count + 1, settings)
        return loss

    def _open(self, param: Tensor, window: int) -> _Row:
        """Return the row of a parameter, whose state begins with zeros."""
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


def _batches(rows: list[_Row], most: int) -> Iterator[list[_Row]]:
    """Give rows in batches of about ``most`` elements; long ones in pieces, if their memory allows it."""
    batch: list[_Row] = []
    numel = 0
    for row in rows:
        slices: Iterable[_Row] = [row]
        if row[0].numel() > most and all(one.is_contiguous() for one in row):
            slices = zip(*(torch.split(one.view(-1), most) for one in row), strict=True)
        for one_slice in slices:
            if batch and numel + one_slice[0].numel() > most:
                yield batch
                batch, numel = [], 0
            batch.append(one_slice)
            numel += one_slice[0].numel()
    if batch:
        yield batch


def _advance(batch: list[_Row], count: int, group: Group) -> None:
    params, gradients, means, squares, accumulated = zip(*batch, strict=True)
    (beta1, beta2), window, weight_decay = group["betas"], group["window"], group["weight_decay"]
    if weight_decay and group["decoupled"]:
        torch._foreach_mul_(params, 1.0 - group["lr"] * weight_decay)
    elif weight_decay:
        gradients = torch._foreach_add(gradients, params, alpha=weight_decay)

    def fold(gradients: tuple[Tensor, ...]) -> None:
        torch._foreach_lerp_(means, gradients, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - beta2)

    if window == 1:
        fold(gradients)
        moved, roots = means, torch._foreach_sqrt(squares)
    else:
        # The moments as they would be with this gradient; what is kept of them stays.
        torch._foreach_add_(accumulated, gradients, alpha=1.0 / window)
        moved, roots = torch._foreach_lerp(means, gradients, 1.0 - beta1), torch._foreach_mul(squares, beta2)
        torch._foreach_addcmul_(roots, gradients, gradients, value=1.0 - beta2)
        torch._foreach_sqrt_(roots)
    # Both moments began with zeros, which is corrected for.
    windows = -(-count // window)
    torch._foreach_div_(roots, math.sqrt(1.0 - beta2**windows))
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_addcdiv_(params, moved, roots, value=-group["lr"] / (1.0 - beta1**windows))
    if window > 1 and count % window == 0:
        fold(accumulated)
        torch._foreach_zero_(accumulated)
