"""A transport that is not the library's own carries either leg of a world, and keeps the laws of both."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flexcomm
import flexdemo
from flexcomm import testing
from flexcomm.bootstrap.consistency import digest_of
from flexcomm.errors import (
    ConfigMismatchError,
    InvalidArgumentError,
    InvalidTensorError,
    TopologyError,
    TransportUnavailableError,
)
from tests.ranks.laws import keep
from tests.ranks.processes import observe_ranks
from tests.ranks.shapes import Shape
from tests.ranks.sync_laws import check_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from flexcomm import Compressor, Handle, Transport, World


class Recording:
    """Hands every verb on to another transport, and remembers which ones; it has nothing that the Protocol has not."""

    def __init__(self, other: Transport) -> None:
        self.name = f"recorded {other.name}"
        self.rank, self.size, self.timeout_s = other.rank, other.size, other.timeout_s
        self.verbs: list[str] = []
        self.closed = False
        self._other = other

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Handle[Tensor]:
        self.verbs.append("all_gather")
        return self._other.all_gather(x, out)

    def all_gatherv(self, x: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Handle[tuple[Tensor, ...]]:
        self.verbs.append("all_gatherv")
        return self._other.all_gatherv(x, counts, out)

    def all_reduce(self, x: Tensor) -> Handle[Tensor]:
        self.verbs.append("all_reduce")
        return self._other.all_reduce(x)

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Handle[Tensor]:
        self.verbs.append("reduce_scatter")
        return self._other.reduce_scatter(x, out)

    def broadcast(self, x: Tensor, root: int = 0) -> Handle[Tensor]:
        self.verbs.append("broadcast")
        return self._other.broadcast(x, root)

    def send_recv(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Handle[tuple[Tensor, ...]]:
        self.verbs.append("send_recv")
        return self._other.send_recv(sends, receives)

    def barrier(self) -> Handle[None]:
        self.verbs.append("barrier")
        return self._other.barrier()

    def close(self) -> None:
        self.closed = True


class Cloning(Recording):
    """One that can make a second group, of which it knows how."""

    def __init__(self, other: Transport, second: Callable[[], Transport]) -> None:
        super().__init__(other)
        self._second = second

    def clone(self) -> Recording:
        return Recording(self._second())


class ForDevicesOnly(Recording):
    """Refuses what comes from the host: settings and outcomes, which are digests and counts, where data are not."""

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Handle[Tensor]:
        refuse_from_host(x)
        return super().all_gather(x, out)

    def all_gatherv(self, x: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Handle[tuple[Tensor, ...]]:
        refuse_from_host(x)
        return super().all_gatherv(x, counts, out)

    def all_reduce(self, x: Tensor) -> Handle[Tensor]:
        refuse_from_host(x)
        return super().all_reduce(x)


def refuse_from_host(x: Tensor) -> None:
    is_length = x.dtype == torch.int64 and x.shape == (1,)  # of a payload, and where that is
    is_count = x.dtype in (torch.int32, torch.int64) and not is_length
    if is_count or (x.dtype == torch.uint8 and x.numel() == DIGEST_NBYTES):
        raise InvalidTensorError(f"got a host tensor: {x.dtype} {list(x.shape)}")


DIGEST_NBYTES = len(digest_of({}))


def needs_no_host_tensors(world: World) -> None:
    """Syncs, exchanges and an optimizer of shards, whose settings and outcomes go elsewhere."""
    node, size = world.topology.node, world.topology.local_size
    intra, inter = ForDevicesOnly(world.intra), ForDevicesOnly(world.inter)
    with flexcomm.connect(intra=intra, inter=inter) as own:
        for compressor in (flexcomm.demo(), flexcomm.threshold(0.5)):
            x = torch.full((640 + own.topology.local_rank,), 1.0 + node)
            flexcomm.start_exchange(x, compressor, world=own).wait()
        flexcomm.hierarchical_sync(torch.ones(640), flexcomm.demo(), world=own)
        with pytest.raises(ConfigMismatchError, match=r"tensor 0: .* on rank 0; .* on rank 1"):
            flexcomm.start_exchange(torch.ones(7 + node), flexcomm.dense(), world=own)
        params = [torch.nn.Parameter(torch.zeros(5 * size)), torch.nn.Parameter(torch.zeros(3))]
        optimizer = flexdemo.FlexDeMo(params, lr=0.5, compressor=flexcomm.dense(), world=own, node_averaged=True)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert all(bool((param == -0.5).all()) for param in params)
        optimizer.load_state_dict(optimizer.state_dict())
        own.control.barrier().wait()


def test_settings_and_outcomes_do_not_travel_over_transports_of_devices() -> None:
    keep(needs_no_host_tensors, Shape(2, 2))


def on_both_legs(law: Callable[[World], object], world: World) -> None:
    intra, inter = Recording(world.intra), Recording(world.inter)
    with flexcomm.connect(intra=intra, inter=inter) as own:
        assert (own.intra, own.inter) == (intra, inter)
        law(own)
    assert not intra.closed
    assert not inter.closed
    assert world.topology.nodes == 1 or set(inter.verbs) & {"all_gather", "all_gatherv", "all_reduce", "send_recv"}


@pytest.mark.timeout(150)  # All laws of synchronisation, one after the other.
@pytest.mark.parametrize(
    ("shape", "recipe"), [(Shape(2, 2), flexcomm.demo()), (Shape(3, 1), flexcomm.random_k(0.1))], ids=["2x2", "3x1"]
)
def test_a_sync_over_foreign_transports_keeps_every_law(shape: Shape, recipe: Compressor) -> None:
    keep(partial(on_both_legs, partial(check_sync, compressor=recipe)), shape, limit_s=120)


def holds_a_foreign_transport_to_its_laws(world: World) -> None:
    for transport in (Recording(world.intra), Recording(world.inter)):
        testing.check_transport(transport)


@pytest.mark.parametrize("shape", [Shape(2, 2), Shape(3, 1)], ids=str)
def test_a_foreign_transport_is_held_to_the_laws_of_one(shape: Shape) -> None:
    keep(holds_a_foreign_transport_to_its_laws, shape)


def mixes_on_clones(world: World) -> None:
    spare = world.clone_groups()
    inter = Cloning(world.inter, lambda: spare.inter)
    with flexcomm.connect(inter=inter) as own:
        schedule = flexcomm.gossip.complete(own.topology.nodes)
        x = torch.full((1000,), float(own.topology.node))
        mixed = flexcomm.mix(x, schedule, step=0, world=own).tensors
    # A third has no end in binary, so a mean over three nodes is rounded.
    torch.testing.assert_close(mixed, torch.full((1000,), (world.topology.nodes - 1) / 2))


def test_mixing_works_on_what_clone_returns() -> None:
    keep(mixes_on_clones, Shape(3, 1))


def refuses_to_clone(world: World) -> None:
    said = r"Recording\('recorded gloo'\), passed as inter.* clone\(\)"
    with flexcomm.connect(inter=Recording(world.inter)) as own:
        with pytest.raises(TransportUnavailableError, match=said):
            own.clone_groups()
        assert "inter Recording('recorded gloo')" in repr(own)


def test_a_foreign_transport_without_clone_says_what_to_implement() -> None:
    keep(refuses_to_clone, Shape(2, 2))


def passes_a_transport_of_other_ranks(world: World) -> None:
    """On one rank only: all of them raise, and none is left waiting."""
    inter = Recording(world.inter)
    if world.topology.rank == 2:
        inter.size = 7
    with pytest.raises(TopologyError) as caught:
        flexcomm.connect(inter=inter)
    mine = "with rank 1 of 7, but needed is rank 1 of 2" if world.topology.rank == 2 else "passed on ranks [2]"
    assert mine in str(caught.value)


def test_a_foreign_transport_must_join_the_ranks_of_its_leg() -> None:
    keep(passes_a_transport_of_other_ranks, Shape(2, 2))


def passes_another_name() -> None:
    with flexcomm.connect(ranks_per_node=1, timeout_s=30) as world:
        inter = Recording(world.inter)
        inter.name += f" {world.topology.rank}"
        flexcomm.connect(inter=inter, ranks_per_node=1, timeout_s=30)


def test_ranks_agree_on_the_name_of_a_foreign_transport() -> None:
    outcomes = observe_ranks(passes_another_name, 2)
    assert all("Recording('recorded gloo 1') on rank 1" in str(outcome.error) for outcome in outcomes)


def test_what_is_no_transport_is_refused_with_what_it_lacks() -> None:
    nothing: Any = object()
    with pytest.raises(InvalidArgumentError, match="it has no name, rank, size, timeout_s, all_gather"):
        flexcomm.connect(intra=nothing)
