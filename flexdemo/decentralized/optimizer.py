"""Any of torch's optimizers on nodes that mix their parameters with few others, behind a whole iteration."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flexcomm import InvalidArgumentError, mix
from flexcomm.gossip import base, complete
from flexcomm.sync import BUCKET_BYTES
from flexcomm.world import default_world
from flexdemo.checkpoint.node_axis import FromOtherNodes
from flexdemo.decentralized.choices import check_choices, check_not_flat
from flexdemo.decentralized.clipping import clip_, squared_norm
from flexdemo.decentralized.consensus import BEGINNING, ConsensusControl, Judge
from flexdemo.decentralized.lanes import take_lane
from flexdemo.decentralized.parts import MixTerms, Part, cut_into_parts
from flexdemo.decentralized.saving import ReplicaMemory
from flexdemo.gradients import ReadyBuckets, check_same_buckets, plan_buckets
from flexdemo.inner import Inner
from flexdemo.parameters import broadcast_parameters_, check_parameter, local, names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch.nn import Parameter

    from flexcomm import Compressor, World
    from flexcomm.gossip import ScheduleLike
    from flexdemo.checkpoint.node_axis import OtherNodes
    from flexdemo.decentralized.choices import Order, Overlap
    from flexdemo.gradients import Bucket
    from flexdemo.parameters import Group

__all__ = ["DecentralizedOptimizer"]


class DecentralizedOptimizer(FromOtherNodes, Optimizer):
    """Torch's ``optimizer`` on every replica, whose parameters are mixed with those of a few other nodes at a time.

    ``x <- W x - lr * d(x)`` (D-PSGD and decentralized Adam, arXiv 2410.11998): ``d`` is the optimizer's own step, on
    the gradient at the unmixed ``x``, with moments that stay local; ``W`` are the weights of ``schedule``'s phase. Each
    bucket of parameters leaves after its step, and is waited for one iteration later. Replicas begin with the bits of
    node 0, and stay close, not equal: evaluate inside ``with optimizer.average():``. Groups and learning rates are
    those of ``optimizer``; schedulers want this one. docs/decentralized.md says which schedule fits which cluster.

    A replica is a rank, whose parameters are averaged with those of its node in every mix, or a node whose ranks share
    one by FSDP2. ``compressor``, on graphs that do not change, sends changes only, ``gamma`` is the share of the way to
    ``W x`` to go. ``max_norm`` clips the whole gradient. ``control`` mixes more while replicas are too far apart.
    """

    # torch's GradScaler leaves inf and scale to optimizers that say so. Were it to leave a step out, peers would wait.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: ScheduleLike | None = None,
        *,
        world: World | None = None,
        order: Order = "mix-then-step",
        overlap: Overlap = "step",
        gamma: float | None = None,
        compressor: Compressor | None = None,
        max_norm: float | None = None,
        control: ConsensusControl | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        check_choices(order, overlap, max_norm)
        self._world = default_world() if world is None else world
        self._lane, nodes = take_lane(self, self._world), self._world.topology.nodes
        self._terms = MixTerms(schedule or base(nodes), gamma, compressor)
        self._everybody = MixTerms(complete(nodes))
        self._order, self._overlap, self._max_norm, self._bucket_bytes = order, overlap, max_norm, bucket_bytes
        self._inner = optimizer
        self._sharer = Inner([optimizer], [len(optimizer.param_groups)])
        self._trained: set[Parameter] = set()
        self._buckets: list[Bucket] = []
        self._parts: dict[Bucket, list[Part]] = {}
        self._ready = ReadyBuckets(self._advance)
        self._skips = False
        self._is_ready = False
        super().__init__(optimizer.param_groups, {"step": 0, "mixes": 0, **BEGINNING})
        self._sharer.adopt(self)
        self.defaults |= optimizer.defaults
        self._judge = None if control is None else Judge(control, self._world, self.param_groups)
        self._memory = ReplicaMemory(self._world)
        self._is_ready = True
        self._refresh()

    @property
    def schedule(self) -> ScheduleLike:
        """Who mixes with whom."""
        return self._terms.schedule

    @property
    def rounds(self) -> int:
        """How many rounds a step mixes: more than one only if ``control`` asks for it."""
        return 1 if self._judge is None else self._judge.rounds

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Mix what is under way in, take the optimizer's step, and let the parameters leave again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refresh()
        self._prepare_gradients()
        try:
            self._ready.check_unchanged()
            self._ready.launch_rest()
        finally:
            self._ready.reset()
            self._skips = False
        self._finish_step()
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for backward passes that only accumulate: with ``overlap="backward"``, nothing moves."""
        return self._ready.paused()

    @contextmanager
    def average(self, buffers: Iterable[Tensor] = ()) -> Iterator[None]:
        """Hold the mean of all replicas in the parameters, on all ranks; afterwards they are what they were.

        What is under way arrives before, and is mixed in by the next step, as if nothing had been. ``buffers``, such as
        ``model.buffers()``, are never mixed; those given here that hold floats are averaged for the time, too.
        """
        floats = [x for x in buffers if x.is_floating_point()]
        kept = [(part, [x.clone() for x in part.tensors]) for part in self._all_parts()]
        kept_floats = [x.clone() for x in floats]
        for part, _ in kept:
            part.let_arrive()
        try:
            self._write_means(floats)
            yield
        finally:
            for part, values in kept:
                part.write(values)
            for x, value in zip(floats, kept_floats, strict=True):
                x.copy_(value)

    @torch.no_grad()
    def _write_means(self, floats: list[Tensor]) -> None:
        for part in self._all_parts():
            part.write(part.mean()[0])
        for x in floats:
            mix(x, self._everybody.schedule, 0, world=self._world, communicator=self._lane, out=x)

    @torch.no_grad()
    def average_(self) -> None:
        """Let all replicas become their mean, for good: the end of training, or a new beginning. All ranks call it."""
        self.restart()
        self._write_means([])

    def restart(self) -> None:
        """Let what is under way arrive and be forgotten, so that parameters may be changed. All ranks call it.

        The next step mixes what they are then.
        """
        self._check_between_steps("restarted")
        for part in self._all_parts():
            part.drop()

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Return the root mean square, over replicas, of the distance to their mean. All ranks call it together."""
        total = torch.zeros(1, dtype=torch.float64)
        for part in self._all_parts():
            part.let_arrive()
            total += part.mean()[1].cpu() * (self._world.topology.local_size if part.shards else 1.0)
        return math.sqrt(float(self._world.control.all_gather(total).wait().mean()))

    def last_moved(self) -> float:
        """Return how far the last mix moved this rank's parameters: an estimate of the distance that costs nothing."""
        return math.sqrt(sum(float(part.moved) for part in self._all_parts() if part.moved is not None))

    def _moved_of_replica(self) -> float:
        """Return the square of that, of a whole replica: this rank's shards stand for those of its node."""
        ranks = self._world.topology.local_size
        moved = [(part, float(part.moved)) for part in self._all_parts() if part.moved is not None]
        return sum(squared * (ranks if part.shards else 1) for part, squared in moved)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, on all ranks alike; they become those of node 0."""
        if self._is_ready:
            first = self.param_groups[0]
            for name, value in self._inner.defaults.items():
                param_group.setdefault(name, value)
            param_group.update(step=first["step"], mixes=first["mixes"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param, name in zip(group["params"], names_of(self.param_groups)[-1], strict=True):
            check_parameter(param, name, self._world.topology)
            check_not_flat(param, name)
            # Present before the first step: torch's checkpoints take that for granted.
            self.state[param] = self.state.get(param, {})
        broadcast_parameters_(group["params"], self._world)
        if self._is_ready:
            self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own format, in which everything has a node axis: replicas differ, also in parameters.

        What is under way need not be saved: it follows from what the parameters are.
        """
        self._check_between_steps("saved")
        outlined = self._outline()
        self.state.update(outlined)
        saved = self._memory.added_to(super().state_dict(), self.param_groups, self._all_parts())
        self.state.update({param: {} for param in outlined})
        return saved

    def load_state_dict(self, state_dict: dict[str, Any], other_nodes: OtherNodes | None = None) -> None:
        """Go on from a state, bit for bit; the parameters are part of it. All ranks call it together.

        ``other_nodes`` says what to do if it is of another number of nodes; that is an error, if nothing is said.
        """
        self._ready.reset()
        self.restart()
        self._refresh()
        told = other_nodes or self._other_nodes
        rest = self._memory.taken_from(state_dict, self.param_groups, self._all_parts(), told)
        groups = self.param_groups
        super().load_state_dict(rest)
        groups[:] = self.param_groups
        self.param_groups = groups

    def _check_between_steps(self, what: str) -> None:
        if self._ready.has_launched:
            raise InvalidArgumentError(
                f"this optimizer cannot be {what} between backward() and step(): with overlap='backward' some buckets "
                f"have stepped, others have not. Call step() first."
            )

    def __getstate__(self) -> dict[str, Any]:
        raise InvalidArgumentError(
            "a decentralized optimizer has cables and hooks, and cannot be copied or pickled: make another, and load "
            "state_dict()."
        )

    def _outline(self) -> dict[Tensor, dict[str, Any]]:
        """Return states of a first step for parameters that have none yet. It moves them, and moves them back."""
        parts = self._all_parts()
        for part in parts:
            part.let_arrive()
        outlined = self._sharer.outline(self)
        for part in parts:
            part.accept_changes()
        return outlined

    def _refresh(self) -> None:
        """Plan buckets of parameters that joined, or want gradients only now. All ranks come here alike."""
        params = (param for group in self.param_groups for param in group["params"])
        new = {param for param in params if param.requires_grad and param not in self._trained}
        if not new:
            return
        self._trained |= new
        buckets = plan_buckets(self.param_groups, self._bucket_bytes, new.__contains__)
        check_same_buckets(buckets, self._world)
        self._buckets += buckets
        self._parts |= {bucket: cut_into_parts(bucket, self._world, self._terms, self._lane) for bucket in buckets}
        self._memory.measure(part for bucket in buckets for part in self._parts[bucket])
        self._ready.watch(self._buckets, early=self._overlap == "backward")

    def _all_parts(self) -> list[Part]:
        return [part for bucket in self._buckets for part in self._parts[bucket]]

    def _prepare_gradients(self) -> None:
        """Unscale and clip, where asked for; find out whether this replica's step is left out."""
        # Set by torch's GradScaler for the time of the step.
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None:
            self._skips = self._anybody_skips(found_inf)
        if scale is not None and self._overlap == "backward":
            raise InvalidArgumentError(
                "GradScaler unscales gradients after the backward pass, but overlap='backward' steps on them before: "
                "use overlap='step', or bfloat16, which needs no scaler."
            )
        if scale is not None:
            gradients = [local(p.grad) for bucket in self._buckets for p in bucket.params if p.grad is not None]
            torch._foreach_div_(gradients, scale)
        if self._max_norm is not None:
            clip_(self._buckets, self._world, self._max_norm)

    def _anybody_skips(self, found_inf: Tensor) -> bool:
        """Return whether this rank, or one that has shards of the same replica, found infinity."""
        if any(bucket.averaged for bucket in self._buckets) and self._world.intra.size > 1:
            found_inf = self._world.intra.all_reduce(found_inf.reshape(1).clone()).wait()
        return bool(found_inf.item())

    @torch.no_grad()
    def _advance(self, bucket: Bucket) -> None:
        """Take a bucket from one iteration to the next: mix in what came, step, leave."""
        group = self.param_groups[bucket.group]
        mixed = 0
        if self._order == "mix-then-step" and group["step"] > 0:
            mixed = self._mix_in(bucket, self._terms_of_last_launch())
        if not self._skips:
            self._step_inner(bucket)
        if self._order == "step-then-mix" or self._overlap != "none":
            self._leave(bucket, group["mixes"] + mixed, self._terms_of_next_launch())

    def _leave(self, bucket: Bucket, number: int, terms: MixTerms) -> None:
        """Start mix number ``number`` of a bucket, unless it is under way."""
        for part in self._parts[bucket]:
            if not part.is_under_way:
                part.start(number, terms)

    def _mix_in(self, bucket: Bucket, terms: MixTerms) -> int:
        """Finish the mix under way, and take more rounds if asked to; return how many there were.

        Where nothing is under way, as after loading a state, it starts here: to the same end.
        """
        for number in range(self.rounds):
            self._leave(bucket, self.param_groups[bucket.group]["mixes"] + number, self._terms if number else terms)
            for part in self._parts[bucket]:
                part.finish()
        return self.rounds

    def _step_inner(self, bucket: Bucket) -> None:
        """Let torch's optimizer step on the parameters of one bucket. On push-sum's numerators, hence the weight."""
        group, weight = self.param_groups[bucket.group], self._push_weight(bucket)
        lr = group["lr"] if weight == 1.0 else group["lr"] / weight
        self._inner.param_groups, self._inner.state = [{**group, "params": list(bucket.params), "lr": lr}], self.state
        self._inner.step()

    def _push_weight(self, bucket: Bucket) -> float:
        push_sum = self._parts[bucket][0].push_sum
        return 1.0 if push_sum is None else push_sum.weight

    def _finish_step(self) -> None:
        """Count, and let all ranks decide how much the next steps mix."""
        first = self.param_groups[0]
        if self._order == "step-then-mix":
            for bucket in self._buckets:
                self._mix_in(bucket, self._terms_of_next_launch())
        mixes = self.rounds if self._order == "step-then-mix" or first["step"] > 0 else 0
        for group in self.param_groups:
            group["step"] += 1
            group["mixes"] += mixes
        if self._judge is not None:
            self._judge.note_launch()
            if self._judge.is_due(first["step"]):
                squared = float(squared_norm(self._buckets, self._world))
                self._judge.hear(self._moved_of_replica(), squared, float(first["lr"]))

    def _terms_of_next_launch(self) -> MixTerms:
        return self._everybody if self._judge is not None and self._judge.mixes_all else self._terms

    def _terms_of_last_launch(self) -> MixTerms:
        return self._everybody if self._judge is not None and self._judge.launched_all else self._terms
