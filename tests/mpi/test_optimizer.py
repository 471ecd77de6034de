"""The optimizers and hooks keep a core of their laws over MPI: gradients of FSDP inside a node still go by gloo."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

import flexcomm
from tests.ranks import checkpoint_laws, decentralized_laws, hook_laws, optimizer_laws
from tests.ranks.laws import cases
from tests.ranks.optimizer_laws import OPTIMIZERS, fifty_steps_are_demos, replicas_of
from tests.ranks.shapes import Shape
from tests.slow import slow_but

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flexcomm import World
    from tests.mpi.shaped import Shaped

pytestmark = pytest.mark.mpi

LAWS: dict[str, Callable[[World], object]] = {
    **{
        law.__name__: law
        for law in (
            optimizer_laws.overlap_gives_the_same_bits,
            optimizer_laws.unused_parameters_are_not_waited_for,
            optimizer_laws.a_nan_on_one_rank_changes_nothing_on_any,
            optimizer_laws.a_node_that_fails_alone_does_not_miss_the_meeting,
            optimizer_laws.a_grad_scaler_scales_and_skips_on_all_ranks_alike,
            optimizer_laws.replicas_begin_as_node_0,
        )
    },
    **{name: law for name, law in replicas_of().items() if name.endswith((", sign", ", overlap", ", outer"))},
    **{f"decentralized, {name}": decentralized_laws.LAWS[name] for name in decentralized_laws.CORE},
    "states_go_on, sign": partial(checkpoint_laws.states_go_on, name=next(iter(OPTIMIZERS))),
}
SLOW = (
    "a_grad_scaler_scales_and_skips_on_all_ranks_alike", "replicas_begin_as_node_0",
    "replicas_hold_the_same_bits, outer", "decentralized, fifty_steps_are_those_of_a_reference, ring",
    "decentralized, averaging_leaves_no_trace", "decentralized, a run goes on, plain",
)  # fmt: skip


def usual_over_mpi(shape: Shape) -> list[str]:
    """What runs beside the caller, and what fails on some ranks, is another affair over MPI; of the rest, little is."""
    return [name for name in LAWS if name not in SLOW] if shape == Shape(2, 2) else []


@pytest.mark.parametrize(
    ("shaped", "law"), cases((Shape(2, 1), Shape(2, 2)), LAWS, usual_over_mpi), indirect=["shaped"], scope="module"
)
def test_the_optimizers_keep_the_law(shaped: Shaped, law: str) -> None:
    shaped.keep(LAWS[law])


@pytest.mark.slow
@pytest.mark.parametrize("shaped", [Shape(2, 1), Shape(4, 1)], indirect=True, scope="module", ids=str)
def test_fifty_steps_are_demos(shaped: Shaped) -> None:
    shaped.keep(partial(fifty_steps_are_demos, shape=(70, 130), k=32, seed=7))


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[World]:
    """Four ranks as two nodes: MPI between them, gloo for torch's own groups."""
    with flexcomm.connect(ranks_per_node=2, timeout_s=60) as world:
        yield world


USUAL_HOOK_LAWS = (
    hook_laws.the_fsdp2_hook_is_the_optimizers_exchange,
    hook_laws.the_ddp_hook_is_the_optimizers_exchange,
)
HOOK_LAWS = (
    *USUAL_HOOK_LAWS,
    hook_laws.fsdp2_sends_all,
    hook_laws.ddp_sends_all,
    hook_laws.fsdp1_sends_all,
    hook_laws.optimizers_take_shards,
    hook_laws.a_nan_leaves_residuals_alone,
)


@pytest.mark.parametrize("law", slow_but(USUAL_HOOK_LAWS, HOOK_LAWS), ids=lambda law: law.__name__)
def test_hooks_keep_the_law(two_nodes: World, law: Callable[[World], object]) -> None:
    law(two_nodes)
    two_nodes.control.barrier().wait()


@pytest.mark.parametrize("name", slow_but(["hook, FSDP2"], ["FlexDeMo, FSDP2", "hook, FSDP2", "hook, DDP"]))
def test_checkpoints_go_on(two_nodes: World, name: str) -> None:
    checkpoint_laws.files_go_on(two_nodes, name)
    two_nodes.control.barrier().wait()
