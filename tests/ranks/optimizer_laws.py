"""The laws of the optimizers, held in any world: all ranks call a law together, and it raises where it is broken."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import flexcomm
from flexcomm import ConfigMismatchError, InvalidArgumentError, InvalidTensorError, NonFiniteError, World
from flexdemo import DistributedOptimizer, FlexDeMo, FlexDeMoAdamW, OuterOptimizer
from flexdemo.base import NodeOptimizer
from tests.naive_demo import CLOSEST, ROUNDING, NaiveDemo
from tests.ranks.sync_laws import require_same_everywhere
from tests.ranks.zoo import Zoo, gradients_at

if TYPE_CHECKING:
    from collections.abc import Sequence

Make = Callable[[Zoo, World], NodeOptimizer]

SMALL = 20_000
"""Bytes of a bucket: several of them make a zoo."""


def flexdemo(zoo: Zoo, world: World, **options: Any) -> FlexDeMo:
    return FlexDeMo(zoo.named_parameters(), world=world, **{"lr": 2.0**-7, **options})


def adamw(zoo: Zoo, world: World, **options: Any) -> FlexDeMoAdamW:
    return FlexDeMoAdamW(zoo.named_parameters(), world=world, **{"lr": 2.0**-7, "eps": 1e-4, **options})


def in_two_groups(zoo: Zoo, world: World) -> FlexDeMo:
    matrices = {"params": [zoo.matrix, zoo.square, zoo.stack], "lr": 2.0**-8, "decay": 0.9}
    rest = [param for param in zoo.parameters() if not any(param is one for one in matrices["params"])]
    groups = [matrices, {"params": rest, "compressor": flexcomm.dense(torch.bfloat16), "weight_decay": 0.1}]
    return FlexDeMo(groups, world=world, compressor=flexcomm.demo(k=8))


OPTIMIZERS: dict[str, Make] = {
    "sign": flexdemo,
    "plain": lambda zoo, world: flexdemo(zoo, world, update="plain", weight_decay=0.1),
    "over nodes": lambda zoo, world: flexdemo(zoo, world, average="nodes", alpha=0.25, bucket_bytes=SMALL),
    "sign values": lambda zoo, world: flexdemo(
        zoo, world, compressor=flexcomm.demo(396, values="sign"), alpha=0.3, decay=0.99
    ),
    "random": lambda zoo, world: flexdemo(zoo, world, compressor=flexcomm.random_k(1 / 8), decay=0.9),
    "striding": lambda zoo, world: flexdemo(zoo, world, compressor=flexcomm.striding(1 / 8), decay=1.0),
    "two groups": in_two_groups,
    "overlap": lambda zoo, world: flexdemo(zoo, world, overlap=True, bucket_bytes=SMALL),
    "adamw": lambda zoo, world: adamw(zoo, world, bucket_bytes=SMALL),
    "adamw fused": lambda zoo, world: adamw(zoo, world, fused=True, compressor=flexcomm.dense()),
    "steps": lambda zoo, world: adamw(zoo, world, sync="steps"),
    "muon": lambda zoo, world: DistributedOptimizer(
        [
            torch.optim.Muon([zoo.matrix, zoo.square], lr=2.0**-7),
            torch.optim.SGD([param for param in zoo.parameters() if param.dim() != 2 or not param.numel()], 2.0**-7),
        ],
        compressor=flexcomm.dense(values="sign2"),
        sync="steps",
        world=world,
        bucket_bytes=SMALL,
    ),
    "local": lambda zoo, world: flexdemo(zoo, world, sync_every=4),
    "local adamw": lambda zoo, world: adamw(zoo, world, sync_every=4, bucket_bytes=SMALL),
    "outer": lambda zoo, world: adamw(
        zoo, world, sync_every=2, outer=OuterOptimizer(), compressor=flexcomm.dense(values="sign2")
    ),
}
EVERY = {"local": 4, "local adamw": 4, "outer": 2}
"""After how many steps replicas meet, if not after each."""


def train(zoo: Zoo, optimizer: NodeOptimizer, world: World, steps: Sequence[int], without: Sequence[str] = ()) -> None:
    for step in steps:
        optimizer.zero_grad()
        zoo(gradients_at(world, step, without)).backward()
        optimizer.step()


def trained(world: World, make: Make, steps: int = 4, without: Sequence[str] = ()) -> Zoo:
    zoo = Zoo()
    train(zoo, make(zoo, world), world, range(steps), without)
    return zoo


def values_of(zoo: Zoo) -> list[Tensor]:
    return [param.detach().clone() for param in zoo.parameters()]


def require_equal(one: Zoo, other: Zoo, law: str) -> None:
    for (name, x), y in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(x, y), f"{law}, but {name} differs by up to {float((x - y).detach().abs().max())}"


def require_apart(one: Zoo, other: Zoo, law: str) -> None:
    assert not torch.equal(one.matrix, other.matrix), law


def replicas_hold_the_same_bits(world: World, make: Make, every: int, steps: int) -> None:
    zoo = Zoo()
    before = values_of(zoo)
    optimizer = make(zoo, world)
    for step in range(steps):
        train(zoo, optimizer, world, [step])
        if (step + 1) % every == 0:
            require_same_everywhere(world, values_of(zoo), f"replicas are equal after step {step}")
    for name, old, new in zip((name for name, _ in zoo.named_parameters()), before, zoo.parameters(), strict=True):
        assert new.numel() == 0 or not torch.equal(old, new), f"{name} was never changed"
        assert bool(new.isfinite().all()), f"{name} is finite"


def replicas_of(steps: int = 4, every: int = 1) -> dict[str, Callable[[World], object]]:
    """Return a law for each optimizer, by name; replicas are compared after every so many of the steps they meet in."""
    law = replicas_hold_the_same_bits.__name__
    return {f"{law}, {name}": partial(_replicas_of, name, steps, every) for name in OPTIMIZERS}


def _replicas_of(name: str, steps: int, every: int, world: World) -> None:
    replicas_hold_the_same_bits(world, OPTIMIZERS[name], every * EVERY.get(name, 1), steps)


def local_steps_are_taken_alone(world: World) -> None:
    zoo = Zoo()
    train(zoo, adamw(zoo, world, sync_every=4), world, range(3))
    everybodys = world.inter.all_gather(zoo.matrix.detach()).wait()
    apart = [node for node, other in enumerate(everybodys) if torch.equal(other, zoo.matrix)]
    assert apart == [world.topology.node], f"nodes that go alone go apart, but {apart} are equal"
    inside = world.intra.all_gather(zoo.matrix.detach()).wait()
    assert all(torch.equal(other, zoo.matrix) for other in inside), "the ranks of a node go together"


def a_node_that_fails_alone_does_not_miss_the_meeting(world: World) -> None:
    for failing in (0, 1):
        zoo = Zoo()
        optimizer = adamw(zoo, world, sync_every=2)
        for step in range(4):
            optimizer.zero_grad()
            zoo(gradients_at(world, step)).backward()
            fails = step == failing and world.topology.node == world.topology.nodes - 1
            if fails and world.topology.local_rank == 0:
                zoo.matrix.grad[0, 0] = math.nan
            if fails:
                with pytest.raises(NonFiniteError):
                    optimizer.step()
            else:
                optimizer.step()
        require_same_everywhere(world, values_of(zoo), f"nodes meet, though one failed in step {failing}")


def nodes_meet_where_they_are_on_average(world: World) -> None:
    """Everything is sent, so the difference is the mean of all, up to the rounding of a few float32 additions."""
    zoo, alone = Zoo(), Zoo()
    train(zoo, adamw(zoo, world, sync_every=3, compressor=flexcomm.dense()), world, range(3))
    train(alone, adamw(alone, world.node_only(), compressor=flexcomm.dense()), world, range(3))
    mean = world.inter.all_reduce(alone.matrix.detach().clone()).wait() / world.topology.nodes
    assert float((zoo.matrix.detach() - mean).abs().max()) <= 4 * 2.0**-24 * float(mean.abs().max())


def overlap_gives_the_same_bits(world: World) -> None:
    def make(overlap: bool) -> Make:
        return lambda zoo, world: flexdemo(zoo, world, overlap=overlap, bucket_bytes=SMALL)

    require_equal(trained(world, make(True)), trained(world, make(False)), "overlap changes nothing")


def a_step_takes_one_collective_for_each_bucket(world: World) -> None:
    """Between nodes, by the counters of the world; nothing is cut again on the way."""
    zoo = Zoo()
    optimizer = flexdemo(zoo, world, bucket_bytes=SMALL)
    buckets = optimizer._sync.buckets
    assert sorted(name for bucket in buckets for name in bucket.names) == sorted(
        name for name, _ in zoo.named_parameters()
    )
    assert len(buckets) > 1
    for step in range(2):
        before = world.stats()
        train(zoo, optimizer, world, [step])
        taken = world.stats()["inter_collectives"] - before["inter_collectives"]
        assert taken == len(buckets), f"{taken} collectives for {len(buckets)} buckets"


def the_size_of_buckets_changes_no_bit(world: World) -> None:
    """One algorithm for all tensors of a dtype: alone, small tensors would take another one than large ones."""

    def make(bucket_bytes: int, compressor: flexcomm.Compressor) -> Make:
        return lambda zoo, world: flexdemo(zoo, world, bucket_bytes=bucket_bytes, compressor=compressor)

    for compressor in (flexcomm.top_k(0.5), flexcomm.demo(), flexcomm.random_k(0.1)):
        one = trained(world, make(1 << 30, compressor), steps=2)
        require_equal(one, trained(world, make(SMALL, compressor), steps=2), f"bucketing is invisible: {compressor}")


def unused_parameters_are_not_waited_for(world: World) -> None:
    """With overlap as without: one rank has no gradient for some, and all still agree."""
    without = ["square", "flat"] if world.topology.rank == 0 else []

    def make(overlap: bool) -> Make:
        return lambda zoo, world: flexdemo(zoo, world, overlap=overlap, bucket_bytes=SMALL)

    zoo = trained(world, make(True), without=without)
    require_equal(zoo, trained(world, make(False), without=without), "overlap changes nothing")
    require_same_everywhere(world, values_of(zoo), "replicas are equal")


def no_gradient_counts_as_zero(world: World) -> None:
    zoo, other = Zoo(), Zoo()
    train(zoo, flexdemo(zoo, world), world, range(3), without=["square"])
    optimizer = flexdemo(other, world)
    for step in range(3):
        optimizer.zero_grad()
        other({**gradients_at(world, step), "square": torch.zeros(64, 64)}).backward()
        optimizer.step()
    require_equal(zoo, other, "no gradient counts as zero")


def the_plain_update_is_linear_in_lr(world: World) -> None:
    """Exactly, for powers of two: nothing is rounded differently. Sixteen-bit parameters round their own sums."""

    def make(lr: float) -> Make:
        return lambda zoo, world: flexdemo(zoo, world, lr=lr, update="plain")

    begin, slow, fast = Zoo(), Zoo(), Zoo()
    for zoo in (begin, slow, fast):
        for param in zoo.parameters():
            param.data.zero_()
    train(slow, make(2.0**-9)(slow, world), world, range(3))
    train(fast, make(2.0**-5)(fast, world), world, range(3))
    for name in ("matrix", "flat", "scalar", "stack", "prime"):
        assert torch.equal(16 * getattr(slow, name), getattr(fast, name)), f"{name} moves linearly in lr"


def groups_follow_their_own_settings(world: World) -> None:
    """Two groups of one optimizer do what two optimizers do."""
    zoo, other = Zoo(), Zoo()
    train(zoo, in_two_groups(zoo, world), world, range(4))
    matrices = [other.matrix, other.square, other.stack]
    rest = [param for param in other.parameters() if not any(param is one for one in matrices)]
    one = FlexDeMo(matrices, lr=2.0**-8, decay=0.9, compressor=flexcomm.demo(k=8), world=world)
    two = FlexDeMo(rest, compressor=flexcomm.dense(torch.bfloat16), weight_decay=0.1, world=world)
    for step in range(4):
        other(gradients_at(world, step)).backward()
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    require_equal(zoo, other, "groups do what optimizers of their own do")


def frozen_parameters_stay_and_join_later_as_new(world: World) -> None:
    zoo, other = Zoo(), Zoo()
    zoo.matrix.requires_grad_(False)
    optimizer = flexdemo(zoo, world, overlap=True, bucket_bytes=SMALL)
    train(zoo, optimizer, world, range(2))
    assert torch.equal(zoo.matrix, other.matrix), "a frozen parameter stays"
    zoo.matrix.requires_grad_(True)
    train(zoo, optimizer, world, [2, 3])
    fresh = flexdemo(other, world)
    other.matrix.requires_grad_(True)
    for step in (2, 3):
        for name, gradient in gradients_at(world, step).items():
            getattr(other, name).grad = gradient
        fresh.step()
    assert torch.equal(zoo.matrix, other.matrix), "one that joins late begins without momentum"


def accumulated_gradients_are_their_sum(world: World) -> None:
    zoo, other = Zoo(), Zoo()
    early = flexdemo(zoo, world, overlap=True, bucket_bytes=SMALL)
    late = flexdemo(other, world, bucket_bytes=SMALL)
    for step in (0, 2):
        with early.no_sync():
            zoo(gradients_at(world, step)).backward()
        zoo(gradients_at(world, step + 1)).backward()
        for part in (step, step + 1):
            other(gradients_at(world, part)).backward()
        for optimizer in (early, late):
            optimizer.step()
            optimizer.zero_grad()
    require_equal(zoo, other, "accumulated gradients are their sum")


def gradients_that_left_must_not_change(world: World) -> None:
    """A second backward, clipping: errors on all ranks, and nothing was changed."""
    zoo = Zoo()
    optimizer = flexdemo(zoo, world, overlap=True, bucket_bytes=SMALL)
    train(zoo, optimizer, world, [0])
    with unchanged(zoo, optimizer):
        optimizer.zero_grad()
        zoo(gradients_at(world, 1)).backward()
        with pytest.raises(InvalidArgumentError, match="no_sync"):
            zoo(gradients_at(world, 1)).backward()
        optimizer.zero_grad()
        zoo(gradients_at(world, 1)).backward()
        clip_grad_norm_(zoo.parameters(), 1e-3)
        with pytest.raises(InvalidArgumentError, match="overlap=False"):
            optimizer.step()
    train(zoo, optimizer, world, [1])
    require_equal(zoo, trained(world, flexdemo, steps=2), "what was refused left no trace")


@contextmanager
def unchanged(zoo: Zoo, optimizer: NodeOptimizer, *, exact: bool = True) -> Iterator[None]:
    """Parameters stay as they are, and momenta, too: bit for bit, or to rounding."""
    before, momenta = values_of(zoo), momenta_of(optimizer)
    yield
    optimizer.zero_grad()
    assert all(torch.equal(x, y) for x, y in zip(before, zoo.parameters(), strict=True)), "parameters are unchanged"
    after = momenta_of(optimizer)
    assert after.keys() == momenta.keys(), "momenta are the same"
    far = {name: float((momenta[name] - state).abs().max()) for name, state in after.items() if state.numel()}
    size = max(float(state.abs().max()) for state in momenta.values() if state.numel())
    assert all(distance <= (0.0 if exact else 2.0**-18 * size) for distance in far.values()), "momenta are unchanged"


def momenta_of(optimizer: NodeOptimizer) -> dict[str, Tensor]:
    residuals = optimizer._sync.residuals
    return {
        f"{group} {name}": state.clone() for group, one in residuals.items() for name, state in one.state_dict().items()
    }


def clipping_sees_the_gradients_of_this_rank(world: World) -> None:
    zoo, other = Zoo(), Zoo()
    optimizer, plain = flexdemo(zoo, world), flexdemo(other, world)
    for step in range(2):
        zoo(gradients_at(world, step)).backward()
        other(gradients_at(world, step)).backward()
        norm = clip_grad_norm_(zoo.parameters(), 1.0)
        assert float(norm) > 1.0, "there is something to clip"
        torch._foreach_mul_([param.grad for param in other.parameters()], torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    require_equal(zoo, other, "what was clipped is exchanged")


def a_nan_on_one_rank_changes_nothing_on_any(world: World) -> None:
    """Of several buckets one is unfit; the others have been exchanged by then."""
    for exact in (True, False):
        zoo = Zoo()
        optimizer = flexdemo(zoo, world, bucket_bytes=SMALL, exact_rollback=exact)
        train(zoo, optimizer, world, range(2))
        with unchanged(zoo, optimizer, exact=exact):
            optimizer.zero_grad()
            zoo(gradients_at(world, 2)).backward()
            if world.topology.rank == world.topology.size - 1:
                zoo.matrix.grad[3, 3] = math.nan
            with pytest.raises(NonFiniteError):
                optimizer.step()
        train(zoo, optimizer, world, [2])
        require_same_everywhere(world, values_of(zoo), "replicas are equal after a step that failed")
        if exact:
            require_equal(zoo, trained(world, flexdemo, steps=3), "a step that failed left no trace")


def a_step_can_be_skipped_by_all(world: World) -> None:
    zoo = Zoo()
    for exact in (True, False):
        settings = {"nonfinite": "skip", "weight_decay": 0.5, "bucket_bytes": SMALL, "exact_rollback": exact}
        optimizer = flexdemo(zoo, world, **settings)
        train(zoo, optimizer, world, [0])
        with unchanged(zoo, optimizer, exact=exact):
            optimizer.zero_grad()
            zoo(gradients_at(world, 1)).backward()
            if world.topology.rank == 0:
                zoo.square.grad[0, 0] = math.inf
            optimizer.step()


def a_grad_scaler_scales_and_skips_on_all_ranks_alike(world: World) -> None:
    zoo = Zoo()
    optimizer = flexdemo(zoo, world, bucket_bytes=SMALL)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(zoo(gradients_at(world, step))).backward()
        scaler.step(optimizer)
        scaler.update()
    require_equal(zoo, trained(world, flexdemo, steps=2), "scales of powers of two change no bit")
    with unchanged(zoo, optimizer, exact=False):
        optimizer.zero_grad()
        scaler.scale(zoo(gradients_at(world, 2))).backward()
        if world.topology.rank == 0:
            zoo.matrix.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.get_scale() == 2.0) == (world.topology.rank == 0), "the rank that overflowed lowers its scale"
    optimizer.zero_grad()
    scaler.scale(zoo(gradients_at(world, 3))).backward()
    scaler.step(optimizer)
    require_same_everywhere(world, values_of(zoo), "replicas are equal, whatever each rank's scale is")
    early = flexdemo(zoo, world, overlap=True)
    scaler.scale(zoo(gradients_at(world, 9))).backward()
    with pytest.raises(InvalidArgumentError, match="overlap=True sends them before"):
        scaler.step(early)


def schedulers_set_the_rate(world: World) -> None:
    zoo, other = Zoo(), Zoo()
    optimizer, plain = flexdemo(zoo, world, lr=1.0), flexdemo(other, world)
    scheduler = LambdaLR(optimizer, lambda step: 2.0 ** -(5 + step))
    for step in range(3):
        train(zoo, optimizer, world, [step])
        scheduler.step()
        plain.param_groups[0]["lr"] = 2.0 ** -(5 + step)
        train(other, plain, world, [step])
    require_equal(zoo, other, "a scheduler sets the rate")


def closures_are_called_with_gradients(world: World) -> None:
    zoo = Zoo()
    optimizer = flexdemo(zoo, world)

    def closure() -> float:
        optimizer.zero_grad()
        loss = zoo(gradients_at(world, 0))
        loss.backward()
        return float(loss.detach())

    expected = float(zoo(gradients_at(world, 0)).detach())
    assert optimizer.step(closure) == expected, "a closure's loss is returned"
    require_equal(zoo, trained(world, flexdemo, steps=1), "a closure's gradients are used")


def groups_can_be_added(world: World) -> None:
    zoo, other = Zoo(), Zoo(seed=world.topology.rank)
    first = [zoo.matrix, zoo.flat]
    optimizer = FlexDeMo(first, lr=2.0**-7, world=world)
    assert not torch.equal(other.square, zoo.square) or world.topology.rank == 0, "nodes begin apart"
    train(zoo, optimizer, world, [0])
    optimizer.add_param_group({"params": [other.square], "lr": 2.0**-6})
    assert torch.equal(other.square, zoo.square), "what is added becomes node 0's"
    before = other.square.detach().clone()
    other(gradients_at(world, 1)).backward()
    optimizer.step()
    moved = (other.square.detach() - before).abs()
    assert float(moved.max()) > 0, "what is added is trained"
    require_same_everywhere(world, [other.square.detach()], "replicas are equal")


def replicas_begin_as_node_0(world: World) -> None:
    zoo = Zoo(seed=world.topology.rank)
    flexdemo(zoo, world)
    require_equal(zoo, Zoo(seed=0), "replicas begin as the first rank's")


def fifty_steps_are_demos(world: World, shape: tuple[int, ...], k: int, seed: int) -> None:
    nodes, decay, lr = world.topology.nodes, 0.999, 2.0**-10
    rows, cols = (1, *shape)[-2:]
    naive = NaiveDemo(rows, cols, 64 if rows > 1 else 1, 64, k, nodes=nodes, decay=decay, rate=lr)
    param = torch.nn.Parameter(torch.zeros(shape))
    compressor = flexcomm.demo(k, values="fp32")
    optimizer = FlexDeMo([param], lr, decay=decay, compressor=compressor, update="plain", world=world)
    for step in range(50):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        shared = torch.randn(shape, generator=generator)
        own = [shared + torch.randn(shape, generator=generator) for _ in range(nodes)]
        before = param.detach().clone()
        param.grad = own[world.topology.node]
        param.data.zero_()
        optimizer.step()
        expected = torch.from_numpy(naive.step([one.double().view(rows, cols).numpy() for one in own])).view(shape)
        assert naive.closest > CLOSEST, "inputs with a near tie show nothing: change the seed"
        assert float((param.detach() + expected).abs().max() / expected.abs().max()) <= ROUNDING, (
            f"step {step} is DeMo's"
        )
        param.data.add_(before)


def the_sign_is_of_the_same(world: World) -> None:
    plain, sign = torch.nn.Parameter(torch.zeros(70, 130)), torch.nn.Parameter(torch.zeros(70, 130))
    optimizers = [
        FlexDeMo([plain], 0.5, update="plain", world=world),
        FlexDeMo([sign], 0.5, world=world, weight_decay=0.25),
    ]
    for step in range(3):
        gradient = torch.randn(70, 130, generator=torch.Generator().manual_seed(10 * step + world.topology.node))
        before = plain.detach().clone(), sign.detach().clone()
        for param, optimizer in zip((plain, sign), optimizers, strict=True):
            param.grad = gradient.clone()
            optimizer.step()
        moved = (before[0] - plain).sign()
        expected = before[1] * (1 - 0.5 * 0.25) - 0.5 * moved
        # An update so small that the sum swallows it moves nothing, but has a sign.
        visible = moved != 0
        assert torch.equal(sign[visible], expected[visible]), "the step is the sign of what was received"


def settings_are_checked(world: World) -> None:
    zoo = Zoo()
    wrong: dict[str, Any] = {"lr": -1.0, "decay": 1.5, "alpha": 0.0, "weight_decay": -0.1, "update": "none"}
    for name, value in wrong.items():
        with pytest.raises(InvalidArgumentError, match=f"{name} is"):
            flexdemo(zoo, world, **{name: value})
    with pytest.raises(InvalidArgumentError, match="compressor is 3"):
        flexdemo(zoo, world, compressor=3)
    with pytest.raises(InvalidArgumentError, match="sync_every is 0"):
        flexdemo(zoo, world, sync_every=0)
    with pytest.raises(InvalidArgumentError, match="int64"):
        FlexDeMo([torch.zeros(3, dtype=torch.int64)], world=world)


def without_communication_there_is_momentum(world: World) -> None:
    """The rule is the same on one node: what is not sent stays, and is sent later."""
    param = torch.nn.Parameter(torch.zeros(16, 16))
    compressor = flexcomm.demo(8, chunk=16, values="fp32")
    optimizer = FlexDeMo([param], 1.0, decay=1.0, compressor=compressor, update="plain", world=world.node_only())
    gradient = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    param.grad = gradient.clone()
    optimizer.step()
    first = param.detach().clone()
    param.grad = torch.zeros(16, 16)
    for _ in range(31):
        optimizer.step()
    assert float(first.norm()) < 0.9 * float(gradient.norm()), "a step sends a part"
    # 32 steps of 8 send all 256; each is transformed and added in float32.
    assert float((param.detach() + gradient).abs().max()) < 2.0**-24 * 32, "in the end everything was sent"


def torchs_optimizers_take_their_own_steps(world: World) -> None:
    """Gradients are equal on all ranks, so sending all of them changes nothing but, among three nodes, a rounding."""
    makes: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, dampening=0.5),
        "NAdam": lambda params: torch.optim.NAdam(params, 0.1),
        "RMSprop": lambda params: torch.optim.RMSprop(params, 0.1, alpha=0.9),
        "Rprop": lambda params: torch.optim.Rprop(params, 0.1),
        "ASGD": lambda params: torch.optim.ASGD(params, 0.1),
        "Adagrad": lambda params: torch.optim.Adagrad(params, 0.1, initial_accumulator_value=0.5),
        "AdamW": lambda params: torch.optim.AdamW(params, 0.1, eps=0.0),
    }
    for name, make in makes.items():
        ours, theirs = (torch.nn.Parameter(torch.ones(20, 30)) for _ in range(2))
        one = DistributedOptimizer([make([ours])], compressor=flexcomm.dense(), world=world)
        one.state_dict()
        other = make([theirs])
        for step in range(5):
            gradient = torch.randn(20, 30, generator=torch.Generator().manual_seed(step))
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
            one.step()
            other.step()
        apart = float((ours - theirs).detach().abs().max())
        assert apart <= (0.0 if world.topology.size in (1, 2, 4) else 1e-5), f"{name} is {apart} off"


def an_optimizer_goes_on_where_it_stepped_before(world: World) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    inner, other = torch.optim.AdamW([ours], 0.1), torch.optim.AdamW([theirs], 0.1)
    for param, optimizer in ((ours, inner), (theirs, other)):
        param.grad = torch.full((8, 8), 3.0)
        optimizer.step()
    exchanged = DistributedOptimizer([inner], compressor=flexcomm.dense(), world=world)
    for param, optimizer in ((ours, exchanged), (theirs, other)):
        param.grad = torch.full((8, 8), -1.0)
        optimizer.step()
    assert torch.equal(ours, theirs), "what it remembered is used"


def an_optimizer_that_is_gone_sends_nothing(world: World) -> None:
    zoo = Zoo()
    flexdemo(zoo, world, overlap=True, bucket_bytes=SMALL)
    gc.collect()
    train(zoo, flexdemo(zoo, world, overlap=True, bucket_bytes=SMALL), world, range(2))
    require_equal(zoo, trained(world, flexdemo, steps=2), "the one that is left trains")


def a_gradient_put_in_place_of_another_is_noticed(world: World) -> None:
    zoo = Zoo()
    optimizer = flexdemo(zoo, world, overlap=True, bucket_bytes=SMALL)
    zoo(gradients_at(world, 0)).backward()
    zoo.flat.grad = zoo.flat.grad * 0.0
    with pytest.raises(InvalidArgumentError, match="overlap=False"):
        optimizer.step()


def what_makes_no_sense_together_is_refused(world: World) -> None:
    zoo = Zoo()
    with pytest.raises(InvalidArgumentError, match="outer moves nodes"):
        flexdemo(zoo, world, outer=OuterOptimizer())
    with pytest.raises(InvalidArgumentError, match="are for gradients"):
        adamw(zoo, world, sync="steps", decay=0.9)
    with pytest.raises(InvalidArgumentError, match="sync is 'all'"):
        adamw(zoo, world, sync="all")
    with pytest.raises(InvalidArgumentError, match="LBFGS"):
        DistributedOptimizer([torch.optim.LBFGS([zoo.matrix])], compressor=flexcomm.dense(), world=world)
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = FlexDeMo(table.parameters(), world=world)
    table(torch.tensor([3])).sum().backward()
    with pytest.raises(InvalidTensorError, match="sparse=False"):
        optimizer.step()


def ranks_that_train_other_parameters_are_told(world: World) -> None:
    if world.topology.size == 1:
        return
    zoo = Zoo()
    zoo.matrix.requires_grad_(world.topology.rank != 0)
    with pytest.raises(ConfigMismatchError, match=r"trained parameters, bucket \d+: .* on rank 0; "):
        flexdemo(zoo, world)


def steps_not_sent_are_sent_later(world: World) -> None:
    """One step is taken, and eight meetings send 512 of its 4096 coefficients each: then all have gone that way."""
    param = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = DistributedOptimizer(
        [torch.optim.SGD([param], 1.0)], compressor=flexcomm.demo(512, values="fp32"), sync="steps", world=world
    )
    gradients = [torch.randn(64, 64, generator=torch.Generator().manual_seed(node)) for node in range(99)]
    mean = torch.stack(gradients[: world.topology.nodes]).mean(dim=0)
    for step in range(8):
        param.grad = gradients[world.topology.node].clone() if step == 0 else torch.zeros(64, 64)
        optimizer.step()
        apart = float((param.detach() + mean).abs().max())
        assert step > 0 or apart > 0.1, "the first meeting does not send everything"
    # Each coefficient is transformed and added some ten times in float32, beside others of up to 4.
    assert apart <= 2.0**-24 * 4 * 64, f"all was sent but for {apart}"


def momentum_holds_the_rate_of_its_time(world: World) -> None:
    """The sign forgets how large a rate was; momentum must not, for rates change."""
    zoos = [Zoo(), Zoo()]
    optimizers = [flexdemo(zoo, world, update=update) for zoo, update in zip(zoos, ("sign", "plain"), strict=True)]
    for step in range(3):
        for zoo, optimizer in zip(zoos, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 2.0 ** -(4 + 2 * step)
            train(zoo, optimizer, world, [step])
    sign, plain = (momenta_of(optimizer) for optimizer in optimizers)
    assert sign.keys() == plain.keys()
    assert all(torch.equal(state, plain[name]) for name, state in sign.items()), "momentum does not know the update"


def exactly(world: World, make: Callable[[torch.nn.Parameter], NodeOptimizer], gradients: Sequence[Tensor]) -> Tensor:
    """Return where whole numbers as gradients, the same on all ranks, lead a parameter that begins at zero."""
    param = torch.nn.Parameter(torch.zeros(64))
    optimizer = make(param)
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
    require_same_everywhere(world, [param.detach()], "replicas are equal")
    return param.detach()


def alpha_says_how_much_of_what_was_sent_is_taken_out(world: World) -> None:
    def make(param: torch.nn.Parameter) -> NodeOptimizer:
        whole = flexcomm.dense(torch.float32)
        return FlexDeMo([param], 1.0, compressor=whole, decay=1.0, alpha=0.25, update="plain", world=world)

    gradient = 4 * torch.arange(64.0)
    moved = exactly(world, make, [gradient, torch.zeros(64)])
    assert torch.equal(moved, -1.75 * gradient), "of what was sent first, three quarters are sent again"


def what_waits_for_its_turn_decays(world: World) -> None:
    def make(param: torch.nn.Parameter) -> NodeOptimizer:
        half = flexcomm.striding(1 / 2, values="fp32")
        return DistributedOptimizer([torch.optim.SGD([param], 1.0)], compressor=half, decay=0.5, world=world)

    gradient = 4 * torch.arange(1.0, 65.0)
    moved = -exactly(world, make, [gradient, torch.zeros(64)]) / gradient
    assert sorted(moved.tolist()) == [0.5] * 32 + [1.0] * 32, "one half is sent at once, the other decayed"


def the_outer_optimizer_is_sgd_on_the_way_gone(world: World) -> None:
    gradient = 4 * torch.arange(64.0)
    for nesterov in (True, False):
        outer = OuterOptimizer(lr=0.5, momentum=0.5, nesterov=nesterov)

        def make(param: torch.nn.Parameter, outer: OuterOptimizer = outer) -> NodeOptimizer:
            inner = [torch.optim.SGD([param], 1.0)]
            return DistributedOptimizer(inner, compressor=flexcomm.dense(), sync_every=2, outer=outer, world=world)

        moved = exactly(world, make, [gradient] * 6)
        expected = torch.nn.Parameter(torch.zeros(64))
        sgd = torch.optim.SGD([expected], 0.5, momentum=0.5, nesterov=nesterov)
        for _ in range(3):
            expected.grad = 2 * gradient
            sgd.step()
        assert torch.equal(moved, expected.detach()), f"three meetings are three steps of SGD, nesterov={nesterov}"


LAWS: list[Callable[[World], None]] = [
    steps_not_sent_are_sent_later,
    momentum_holds_the_rate_of_its_time,
    alpha_says_how_much_of_what_was_sent_is_taken_out,
    what_waits_for_its_turn_decays,
    the_outer_optimizer_is_sgd_on_the_way_gone,
    torchs_optimizers_take_their_own_steps,
    an_optimizer_goes_on_where_it_stepped_before,
    an_optimizer_that_is_gone_sends_nothing,
    a_gradient_put_in_place_of_another_is_noticed,
    what_makes_no_sense_together_is_refused,
    ranks_that_train_other_parameters_are_told,
    local_steps_are_taken_alone,
    a_node_that_fails_alone_does_not_miss_the_meeting,
    nodes_meet_where_they_are_on_average,
    overlap_gives_the_same_bits,
    a_step_takes_one_collective_for_each_bucket,
    the_size_of_buckets_changes_no_bit,
    unused_parameters_are_not_waited_for,
    no_gradient_counts_as_zero,
    the_plain_update_is_linear_in_lr,
    groups_follow_their_own_settings,
    frozen_parameters_stay_and_join_later_as_new,
    accumulated_gradients_are_their_sum,
    gradients_that_left_must_not_change,
    clipping_sees_the_gradients_of_this_rank,
    a_nan_on_one_rank_changes_nothing_on_any,
    a_step_can_be_skipped_by_all,
    a_grad_scaler_scales_and_skips_on_all_ranks_alike,
    schedulers_set_the_rate,
    closures_are_called_with_gradients,
    groups_can_be_added,
    replicas_begin_as_node_0,
    the_sign_is_of_the_same,
    settings_are_checked,
    without_communication_there_is_momentum,
]
