"""Calls are numbered within a step, and steps end where the training loop's do, whatever autograd does in between."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexcomm.backend.steps import StepCounter


def _raise(_: Tensor) -> None:
    raise RuntimeError("as a user's hook")


class Loop:
    """A model of three blocks, each of whose gradients makes a call, and the numbers those calls got, by pass."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.ended = 0
        self.steps = StepCounter(self._end)
        self.weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self._call)

    def _call(self, _: Tensor) -> None:
        self.passes[-1].append(self.steps.next_call().number)

    def _end(self) -> None:
        self.ended += 1

    def backward(self, *, checkpointed: int = 0, fails: bool = False) -> None:
        self.passes.append([])
        x = torch.ones(2, requires_grad=True)
        for number, weight in enumerate(self.weights):
            # Not as an argument of the block: gradients of those belong to the pass around it.
            block = partial(torch.mul, weight)
            x = checkpoint(block, x, use_reentrant=True) if number < checkpointed else block(x)
        # Behind two of three gradients.
        hooks = [self.weights[0].register_hook(_raise)] if fails else []
        try:
            x.sum().backward()
        finally:
            for hook in hooks:
                hook.remove()


def test_each_backward_pass_counts_anew() -> None:
    loop = Loop()
    for _ in range(3):
        loop.backward()
    assert loop.passes == [[0, 1, 2]] * 3
    assert loop.steps.step == loop.ended == 3


def test_checkpointed_blocks_belong_to_the_pass_around_them() -> None:
    loop = Loop()
    for _ in range(2):
        loop.backward(checkpointed=2)
    assert loop.passes == [[0, 1, 2]] * 2
    assert loop.steps.step == 2


def test_a_pass_of_checkpointed_blocks_alone_ends_with_the_optimizers_step() -> None:
    loop = Loop()
    optimizer = torch.optim.SGD(loop.weights)
    for _ in range(2):
        loop.backward(checkpointed=3)
        optimizer.step()
    assert loop.passes == [[0, 1, 2]] * 2
    assert loop.steps.step == 2


def test_a_pass_that_failed_is_forgotten() -> None:
    loop = Loop()
    with pytest.raises(RuntimeError, match="as a user's hook"):
        loop.backward(fails=True)
    loop.backward()
    assert loop.passes == [[0, 1], [0, 1, 2]]


def test_an_optimizer_that_steps_inside_a_backward_pass_ends_nothing() -> None:
    loop = Loop()
    optimizer = torch.optim.SGD(loop.weights[2:])
    loop.weights[2].register_post_accumulate_grad_hook(lambda _: optimizer.step())
    loop.backward()
    assert loop.passes == [[0, 1, 2]]


def test_calls_outside_of_backward_are_ended_by_the_optimizers_step() -> None:
    loop = Loop()
    optimizer = torch.optim.SGD(loop.weights)
    assert [loop.steps.next_call() for _ in range(2)] == [("outside", 0), ("outside", 1)]
    optimizer.step()
    optimizer.step()
    assert (loop.steps.next_call(), loop.steps.step) == (("outside", 0), 1)


def test_calls_outside_shift_no_number_of_a_pass() -> None:
    loop = Loop()
    optimizer = torch.optim.SGD(loop.weights)
    for _ in range(2):
        loop.steps.next_call()
        loop.backward()
        optimizer.step()
    assert loop.passes == [[0, 1, 2]] * 2
    assert loop.steps.step == 2


def test_an_optimizer_steps_after_a_group_has_gone() -> None:
    weight = torch.ones(2, requires_grad=True)
    Loop()
    gc.collect()
    torch.optim.SGD([weight]).step()
    torch.optim.SGD([weight]).step()
