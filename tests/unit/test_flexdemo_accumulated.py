"""Accumulated Adam is what its pseudo-code says, is Adam for windows of one, and goes on where it was interrupted."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW

from flexcomm import InvalidArgumentError, InvalidTensorError
from flexdemo import accumulated
from flexdemo.accumulated import AccumAdam

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.optim import Optimizer

SHAPES = ((3, 5), (7,), (), (0,), (41,))
BETAS = (0.8, 0.95)


def parameters(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def gradient(param: Tensor, step: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(param.shape, generator=generator, dtype=param.dtype)


def take_steps(optimizer: Optimizer, steps: range) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in steps:
        for number, param in enumerate(params):
            param.grad = gradient(param, step, number)
        optimizer.step()


class Transcribed:
    """The pseudo-code of arXiv 2410.11998 for one parameter, line by line."""

    def __init__(self, x: Tensor, lr: float, window: int, weight_decay: float, decoupled: bool) -> None:
        self.x, self.lr, self.window, self.weight_decay, self.decoupled = x, lr, window, weight_decay, decoupled
        self.k, self.m, self.v, self.a = 0, *torch.zeros(3, *x.shape, dtype=x.dtype)

    def step(self, g: Tensor, eps: float = 1e-8) -> None:
        b1, b2 = BETAS
        self.k += 1
        c = math.ceil(self.k / self.window)
        if self.decoupled:
            self.x = self.x * (1 - self.lr * self.weight_decay)
        else:
            g = g + self.weight_decay * self.x
        self.a = self.a + g / self.window
        m, v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g**2
        self.x = self.x - self.lr / (1 - b1**c) * m / (v.sqrt() / math.sqrt(1 - b2**c) + eps)
        if self.k % self.window == 0:
            self.m, self.v = b1 * self.m + (1 - b1) * self.a, b2 * self.v + (1 - b2) * self.a**2
            self.a = torch.zeros_like(self.a)


def require_close(got: Tensor, expected: Tensor) -> None:
    """Raise unless both are equal but for the rounding of some dozen operations, of numbers of about one."""
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=2e-15, atol=2e-15)


@pytest.mark.parametrize("window", [1, 4, 8])
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, True), (0.1, True), (0.1, False)])
def test_parameters_and_moments_are_those_of_the_pseudo_code(
    window: int, weight_decay: float, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So few that parameters are cut into pieces.
    monkeypatch.setattr(accumulated, "_CPU_BATCH_NUMEL", 9)
    params = parameters()
    expected = [Transcribed(param.detach().clone(), 0.01, window, weight_decay, decoupled) for param in params]
    optimizer = AccumAdam(params, 0.01, BETAS, weight_decay=weight_decay, window=window, decoupled=decoupled)
    for step in range(3 * window):
        take_steps(optimizer, range(step, step + 1))
        for number, (param, one) in enumerate(zip(params, expected, strict=True)):
            one.step(gradient(param, step, number))
            require_close(param, one.x)
            state = optimizer.state[param]
            require_close(state["exp_avg"], one.m)
            require_close(state["exp_avg_sq"], one.v)
            if window > 1:
                require_close(state["accumulated"], one.a)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_with_a_window_of_one_it_is_torchs_own(decoupled: bool, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    kind = AdamW if decoupled else Adam
    take_steps(AccumAdam(ours, 0.01, weight_decay=0.1, decoupled=decoupled), range(20))
    take_steps(kind(theirs, 0.01, weight_decay=0.1, foreach=True), range(20))
    tolerance = 40 * torch.finfo(dtype).eps
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_what_has_no_gradient_stays_as_it_is() -> None:
    """The second joins late, and rests at one step; its windows are counted by itself."""
    params = parameters()[:2]
    optimizer = AccumAdam(params, 0.01, BETAS, weight_decay=0.1, window=2)
    alone = Transcribed(params[1].detach().clone(), 0.01, 2, 0.1, True)
    for step in range(9):
        params[0].grad = gradient(params[0], step)
        params[1].grad = gradient(params[1], step) if step >= 3 and step != 5 else None
        before = copy.deepcopy(dict(optimizer.state[params[1]])), params[1].detach().clone()
        optimizer.step()
        if params[1].grad is None:
            assert torch.equal(params[1], before[1])
            assert all(torch.equal(optimizer.state[params[1]][name], kept) for name, kept in before[0].items())
        else:
            alone.step(params[1].grad)
    require_close(params[1], alone.x)
    assert [int(optimizer.state[param]["step"]) for param in params] == [9, 5]


def test_groups_have_settings_of_their_own() -> None:
    first, second = parameters()[0], parameters()[1]
    settings: dict[str, Any] = {"lr": torch.tensor(0.5), "weight_decay": 0.2, "window": 3}
    optimizer = AccumAdam([{"params": [first]}, {"params": [second], **settings}], 0.01, BETAS, window=2)
    expected = (
        Transcribed(first.detach().clone(), 0.01, 2, 0.0, True),
        Transcribed(second.detach().clone(), 0.5, 3, 0.2, True),
    )
    take_steps(optimizer, range(7))
    for step in range(7):
        for number, one in enumerate(expected):
            one.step(gradient(one.x, step, number))
    require_close(first, expected[0].x)
    require_close(second, expected[1].x)


def test_interrupted_within_a_window_it_goes_on_with_the_same_bits() -> None:
    through, before, after = (parameters(torch.float32) for _ in range(3))
    take_steps(AccumAdam(through, 0.01, weight_decay=0.1, window=4), range(13))
    interrupted = AccumAdam(before, 0.01, weight_decay=0.1, window=4)
    take_steps(interrupted, range(6))
    assert set(interrupted.state[before[0]]) == {"step", "exp_avg", "exp_avg_sq", "accumulated"}
    resumed = AccumAdam(after, 1.0)
    resumed.load_state_dict(copy.deepcopy(interrupted.state_dict()))
    for new, old in zip(after, before, strict=True):
        new.data.copy_(old)
    take_steps(resumed, range(6, 13))
    assert all(torch.equal(one, other) for one, other in zip(through, after, strict=True))


def test_a_checkpoint_of_adamw_can_be_gone_on_with() -> None:
    params = parameters()
    adamw = AdamW(params, 0.01)
    take_steps(adamw, range(4))
    optimizer = AccumAdam(params, 0.5, window=2)
    optimizer.load_state_dict(adamw.state_dict())
    take_steps(optimizer, range(4, 7))
    assert int(optimizer.state[params[0]]["step"]) == 7
    assert optimizer.state[params[0]]["accumulated"].any()


def test_a_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    param = Parameter(torch.tensor([3.0, -1.0]))
    optimizer = AccumAdam([param], 0.5, window=2)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 10.0
    torch.testing.assert_close(param.detach(), torch.tensor([2.5, -0.5]))


def test_memory_with_gaps_is_stepped_on_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulated, "_CPU_BATCH_NUMEL", 4)
    dense = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    plain, turned = Parameter(dense.clone()), Parameter(dense.t().contiguous().t())
    for param in (plain, turned):
        optimizer = AccumAdam([param], 0.01, window=2)
        for step in range(5):
            param.grad = gradient(plain, step)
            optimizer.step()
    assert torch.equal(plain, turned)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_sharded_parameters_move_as_plain_ones_and_their_state_is_sharded() -> None:
    mesh = init_device_mesh("cpu", (1,))
    plain = [param for param in parameters() if param.dim()]
    sharded = [Parameter(distribute_tensor(param.detach().clone(), mesh, [Shard(0)])) for param in plain]
    ours, theirs = AccumAdam(sharded, 0.01, window=2), AccumAdam(plain, 0.01, window=2)
    for step in range(5):
        for one, other in zip(sharded, plain, strict=True):
            other.grad = gradient(other, step)
            one.grad = distribute_tensor(other.grad, mesh, [Shard(0)])
        ours.step()
        theirs.step()
    for one, other in zip(sharded, plain, strict=True):
        assert isinstance(one.data, DTensor)
        assert torch.equal(one.data.to_local(), other)
        assert all(isinstance(ours.state[one][name], DTensor) for name in ("exp_avg", "exp_avg_sq", "accumulated"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0, but must be at least 0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\), but must be two"),
        ({"betas": (0.9,)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"window": 0}, "window is 0, but must be a whole number, at least 1"),
        ({"window": 2.0}, "window is 2.0"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        AccumAdam(parameters(), **wrong)
    with pytest.raises(InvalidArgumentError, match=message):
        AccumAdam([{"params": parameters(), **wrong}])


def test_a_sparse_gradient_is_refused_and_nothing_moves() -> None:
    params = parameters()[:2]
    kept = [param.detach().clone() for param in params]
    params[0].grad, params[1].grad = gradient(params[0], 0), gradient(params[1], 0).to_sparse()
    with pytest.raises(InvalidTensorError, match="sparse"):
        AccumAdam(params).step()
    assert all(torch.equal(param, before) for param, before in zip(params, kept, strict=True))
