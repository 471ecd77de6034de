"""Residuals change when a synchronisation has succeeded, and not before."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import flexcomm
from flexcomm import InvalidArgumentError, InvalidTensorError, Residuals, TensorSpec
from flexcomm.codec import plan_tensor
from flexcomm.kernels.cpu.kernels import CpuDecoder

CPU = torch.device("cpu")
PLAN = plan_tensor(TensorSpec("w", (100,), torch.float32), flexcomm.top_k(0.1))


def lend(residuals: Residuals, name: str = "w", value: float | None = None) -> list[torch.Tensor]:
    """Lend a state and leave ``value`` as what an encode would leave."""
    lent = residuals.lend(name, PLAN, CPU)
    if value is not None:
        lent[1].fill_(value)
    return lent


def with_value(value: float) -> Residuals:
    residuals = Residuals()
    lend(residuals, value=value)
    residuals.commit(["w"])
    return residuals


def test_a_new_state_is_zero_and_has_memory_of_its_own_for_the_next() -> None:
    state, state_out = lend(Residuals())
    assert tuple(state.shape) == PLAN.state_shape
    assert not state.any()
    assert state.data_ptr() != state_out.data_ptr()


def test_the_share_is_multiplied_to_the_gain() -> None:
    assert Residuals(decay=0.5, gain=3.0, alpha=0.2).update(share=0.25) == (0.5, 0.75, 0.2)


def test_commit_keeps_what_an_encode_left() -> None:
    residuals = with_value(7.0)
    assert bool((residuals["w"] == 7.0).all())
    lend(residuals, value=8.0)
    residuals.commit(["w"])
    assert bool((residuals["w"] == 8.0).all())


def test_giving_up_stays_with_what_was_before() -> None:
    residuals = with_value(7.0)
    lend(residuals, value=8.0)
    residuals.cancel(["w"])
    assert bool((residuals["w"] == 7.0).all())
    assert bool((lend(residuals)[0] == 7.0).all())


def test_no_memory_is_allocated_once_a_state_is_there() -> None:
    residuals, places = with_value(1.0), set()
    for _ in range(4):
        places |= {x.data_ptr() for x in lend(residuals)}
        residuals.commit(["w"])
    assert len(places) == 2


def test_a_tensor_in_use_is_refused_also_where_no_part_of_it_is_kept() -> None:
    residuals = Residuals()
    residuals.claim(["v", "w"])
    with pytest.raises(InvalidArgumentError, match="w: being synchronised"):
        residuals.claim(["u", "w"])
    residuals.claim(["other"])
    residuals.unclaim(["v", "w"])
    residuals.claim(["u", "w"])


@pytest.mark.parametrize("verb", ["reset", "state_dict", "load"])
def test_states_are_not_saved_or_replaced_while_in_flight(verb: str) -> None:
    residuals = Residuals()
    verbs = {
        "reset": residuals.reset,
        "state_dict": residuals.state_dict,
        "load": lambda: residuals.load_state_dict({}),
    }
    residuals.claim(["v", "w"])
    lend(residuals)
    residuals.commit(["w"])
    residuals.unclaim(["w"])
    with pytest.raises(InvalidArgumentError, match=r"v are being synchronised"):
        verbs[verb]()
    residuals.unclaim(["v"])
    verbs[verb]()


def test_states_come_back_from_a_state_dict_as_copies() -> None:
    residuals, other = with_value(7.0), Residuals()
    saved = residuals.state_dict()
    other.load_state_dict(saved)
    assert other.names() == residuals.names() == ["w"]
    saved["w"].zero_()
    assert bool((other["w"] == 7.0).all())
    assert bool((lend(other, value=9.0)[0] == 7.0).all())
    other.commit(["w"])
    assert bool((other["w"] == 9.0).all())


@pytest.mark.parametrize("exact", [True, False])
def test_a_call_that_is_rolled_back_leaves_residuals_and_outputs_as_they_were(exact: bool) -> None:
    residuals, x = Residuals(0.5, exact_rollback=exact), torch.randn(1000, generator=torch.Generator().manual_seed(1))
    with flexcomm.connect() as world:
        out = torch.full((1000,), 7.0)
        # Not by start_sync, whose inputs may change: it keeps a copy.
        plan = flexcomm.plan_sync([x], flexcomm.top_k(0.1), world=world, names=["w"], has_residuals=True)
        start = partial(flexcomm.start_planned, plan, [x], world=world, residuals=residuals)
        start().wait()
        before = residuals["w"].clone()
        handle = start(out=[out])
        handle.verify()
        with pytest.raises(InvalidArgumentError, match="w: being synchronised"):
            start()
        handle.rollback()
    far = float((residuals["w"] - before).abs().max())
    assert far == 0.0 if exact else far <= 2.0**-21 * float(x.abs().max() + before.abs().max())
    assert torch.equal(out, torch.full((1000,), 7.0))


def test_an_error_of_writing_is_raised_again_and_frees_residuals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    residuals = Residuals()

    def run_out(*_: object, **__: object) -> None:
        raise MemoryError("no memory for the averages")

    with flexcomm.connect() as world:
        handle = flexcomm.start_sync(torch.ones(100), flexcomm.top_k(0.1), world=world, residuals=residuals)
        handle.verify()
        with monkeypatch.context() as patched:
            patched.setattr(CpuDecoder, "decode_", run_out)
            for _ in range(2):
                with pytest.raises(MemoryError, match="no memory for the averages"):
                    handle.wait()
        assert residuals.names() == list(residuals.state_dict())
        after = flexcomm.hierarchical_sync(torch.ones(100), flexcomm.top_k(1.0), world=world, residuals=residuals)
    assert bool((after >= 1.0).all())


@pytest.mark.parametrize("algorithm", ["gather", "two_phase", "reduce"])
def test_a_residual_that_does_not_fit_is_refused_by_every_algorithm(algorithm: Any) -> None:
    compressor = flexcomm.random_k(0.1) if algorithm == "reduce" else flexcomm.top_k(0.1)
    residuals = Residuals()
    residuals.load_state_dict({"w": torch.zeros(1, 90)})
    with flexcomm.connect() as world, pytest.raises(InvalidTensorError, match=r"the residual of w is \[1, 90\]"):
        flexcomm.hierarchical_sync(
            [torch.ones(100)], compressor, world=world, residuals=residuals, names=["w"], algorithm=algorithm
        )
    assert torch.equal(residuals["w"], torch.zeros(1, 90))


def test_states_in_place_take_their_memory_once() -> None:
    with flexcomm.connect() as world:
        for exact, spares in ((False, 0), (True, 1)):
            residuals = Residuals(exact_rollback=exact)
            flexcomm.hierarchical_sync(torch.ones(100), flexcomm.top_k(0.1), world=world, residuals=residuals)
            assert len(residuals._spares) == spares


def test_reset_forgets_everything() -> None:
    residuals = with_value(7.0)
    residuals.reset()
    assert residuals.names() == []
    assert not lend(residuals)[0].any()


def test_a_state_of_another_shape_is_refused_and_not_in_flight() -> None:
    residuals = with_value(7.0)
    other = plan_tensor(TensorSpec("w", (90,), torch.float32), flexcomm.top_k(0.1))
    with pytest.raises(InvalidTensorError, match=r"the residual of w is \[1, 100\].*needs \[1, 90\]"):
        residuals.lend("w", other, CPU)
    lend(residuals)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_state_follows_its_tensor_to_another_device(in_place: bool) -> None:
    residuals = with_value(7.0)
    lent = residuals.lend("w", PLAN, torch.device("meta"), in_place=in_place)
    assert [one.device.type for one in (*lent, residuals["w"])] == ["meta"] * 3
    assert not any(one.is_inference() for one in lent)


@pytest.mark.parametrize("state", [torch.zeros(1, 100, dtype=torch.float64), torch.zeros(100)], ids=["dtype", "dims"])
def test_a_state_dict_of_other_tensors_is_refused_and_changes_nothing(state: torch.Tensor) -> None:
    residuals = with_value(7.0)
    with pytest.raises(InvalidTensorError, match=r"the residual of w is torch\.float"):
        residuals.load_state_dict({"v": torch.zeros(1, 5), "w": state})
    assert residuals.names() == ["w"]
