"""Any of torch's optimizers, and Adam, on replicas that mix their parameters with those of a few other nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.fsdp import FlatParameter
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from flexcomm import BUCKET_BYTES, Compressor, InvalidArgumentError, World, default_world, mix
from flexcomm.gossip import ScheduleLike, base, complete
from flexdemo.accumulated import AccumAdam
from flexdemo.checkpoint import DEFAULT_OTHER_NODES, NodeAxis, OtherNodes, check_sizes
from flexdemo.decentralized.buckets import MixBucket, clip_, gradients_of, squared_norm, take_communicator
from flexdemo.decentralized.consensus import INITIAL_STATE, ConsensusControl, update_consensus_
from flexdemo.gradients import ReadyBuckets, bucket_parameters, check_same_buckets
from flexdemo.parameters import (
    Group,
    Rule,
    broadcast_parameters_,
    check_parameter,
    check_settings,
    move_steps_to_host_,
    names_of,
    one_of,
)
from flexdemo.wrapped import Inner

Order = Literal["mix-then-step", "step-then-mix"]
Overlap = Literal["step", "backward", "none"]


class DecentralizedOptimizer(Optimizer):
    """Steps torch's ``optimizer`` on every replica, and mixes parameters with those of a few other nodes at a time.

    ``x <- W x - lr * d(x)`` (D-PSGD and decentralized Adam, arXiv 2410.11998). ``d`` is the step of ``optimizer`` on
    the gradient at the unmixed ``x``, with moments that stay on the replica; ``W`` holds the weights of the schedule's
    phase. The mix of a bucket starts after its step and is waited for one iteration later.

    A replica is a rank, whose parameters are averaged over its node in every mix; or a node, if its ranks share a model
    by FSDP2. Replicas start with the parameters of node 0, and stay close, not equal: evaluate in
    ``with optimizer.average():``. All ranks make the optimizer together.

    Args:
        optimizer: any of torch's whose state is per parameter. Its parameter groups and learning rates are used; pass
            this optimizer, not that one, to learning-rate schedulers.
        schedule: the nodes that mix at each step; ``flexcomm.gossip.base(nodes)`` if not given.
        world: the ranks; those that ``flexcomm.connect()`` finds, if none are given.
        order: ``"mix-then-step"``, as above; or ``"step-then-mix"``, ``W (x - lr * d(x))``, which waits for the mix.
        overlap: when a bucket steps and its mix starts: in ``"step"``, or in ``"backward"`` as soon as its gradients
            are ready; ``"none"`` overlaps nothing. All give the same bits.
        gamma: the share of the way from ``x`` to ``W x``; see :func:`flexcomm.mix`.
        compressor: sends compressed changes of the parameters; needs a fixed schedule.
        max_norm: clips the norm of a replica's whole gradient; not with ``overlap="backward"``.
        control: mixes more while replicas are too far apart.
        bucket_bytes: bytes of the parameters that are mixed together.

    Raises:
        InvalidArgumentError: arguments do not go together, or a parameter cannot be mixed.
        ConfigMismatchError: ranks passed different parameters or arguments.

    Example:
        >>> import torch, flexcomm
        >>> from flexdemo import DecentralizedOptimizer
        >>> model = torch.nn.Linear(2, 1)
        >>> with flexcomm.connect() as world:
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ...     optimizer = DecentralizedOptimizer(sgd, flexcomm.gossip.ring(world.topology.nodes), world=world)
        ...     model(torch.ones(4, 2)).sum().backward()
        ...     optimizer.step()

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
        rules: dict[str, Rule] = {
            "order": one_of(get_args(Order)),
            "overlap": one_of(get_args(Overlap)),
            "max_norm": (lambda value: value is None or value > 0, "above 0"),
        }
        check_settings({"order": order, "overlap": overlap, "max_norm": max_norm}, rules)
        if max_norm is not None and overlap == "backward":
            raise InvalidArgumentError(
                "max_norm needs the whole gradient before the first bucket steps, but with overlap='backward' buckets "
                "step before it is ready: use overlap='step', which hides mixes behind the same iteration."
            )
        self._world = default_world() if world is None else world
        self._communicator = take_communicator(self, self._world)
        self.schedule = schedule or base(self._world.topology.nodes)
        self._gamma, self._compressor, self._max_norm, self._control = gamma, compressor, max_norm, control
        self._order, self._overlap, self._bucket_bytes = order, overlap, bucket_bytes
        self._optimizer = optimizer
        self._inner = Inner([optimizer])
        self._axis = NodeAxis(self._world)
        self._buckets: list[MixBucket] = []
        self._ready = ReadyBuckets(self._advance)
        self._skips = self._is_ready = False
        super().__init__(optimizer.param_groups, {"step": 0, "mixes": 0, **INITIAL_STATE})
        self.state.update(optimizer.state)
        self.defaults |= optimizer.defaults
        self._is_ready = True
        self._refresh()

    @property
    def rounds(self) -> int:
        """The number of mixing rounds in a step; more than one only with ``control``."""
        return 1 if self._control is None else int(self.param_groups[0]["consensus_rounds"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Finish the mixes under way, take the optimizer's step, and start the next mixes."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._refresh()
        self._prepare_gradients()
        try:
            self._ready.launch_rest()
        finally:
            self._skips = False
        self._finish_step()
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for backward passes that only accumulate gradients, and step no bucket."""
        return self._ready.paused()

    @contextmanager
    def average(self, buffers: Iterable[Tensor] = ()) -> Iterator[None]:
        """Hold the mean of all replicas in the parameters, on all ranks, inside the context; restore them afterwards.

        So do floating-point ``buffers``, such as ``model.buffers()``, which are never mixed otherwise.
        """
        floats = [x for x in buffers if x.is_floating_point()]
        tensors = [x for bucket in self._buckets for x in bucket.tensors] + floats
        saved = [x.clone() for x in tensors]
        for bucket in self._buckets:
            bucket.wait_received()
        try:
            self._write_means(floats)
            yield
        finally:
            for x, value in zip(tensors, saved, strict=True):
                x.copy_(value)
            for bucket in self._buckets:
                bucket.accept_changes()

    @torch.no_grad()
    def _write_means(self, floats: list[Tensor]) -> None:
        for bucket in self._buckets:
            torch._foreach_copy_(bucket.tensors, bucket.mean().tensors)
            bucket.accept_changes()
        graph = complete(self._world.topology.nodes)
        for x in floats:
            mix(x, graph, 0, world=self._world, communicator=self._communicator, out=x)

    @torch.no_grad()
    def average_(self) -> None:
        """Replace all replicas by their mean, such as at the end of training. All ranks call it together."""
        self.restart()
        self._write_means([])

    def restart(self) -> None:
        """Cancel the mixes under way, so that parameters may be changed. All ranks call it together."""
        self._check_between_steps("restarted")
        for bucket in self._buckets:
            bucket.cancel()

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Return the root mean square, over replicas, of the distance to their mean. All ranks call it together."""
        total = torch.zeros(1, dtype=torch.float64)
        for bucket in self._buckets:
            bucket.wait_received()
            total += bucket.mean().squared_distance.cpu() * (
                self._world.topology.local_size if bucket.node_averaged else 1.0
            )
        return math.sqrt(float(self._world.control.all_gather(total).wait().mean()))

    def last_moved(self) -> float:
        """Return how far the last mix moved this rank: an estimate of the consensus distance that costs nothing."""
        return math.sqrt(self._squared_distance(ranks=1))

    def _squared_distance(self, ranks: int) -> float:
        """Return the same distance, squared; this rank's shards stand for those of so many ranks of a replica."""
        moved = [(bucket.node_averaged, bucket.squared_distance) for bucket in self._buckets]
        return sum(float(squared) * (ranks if sharded else 1) for sharded, squared in moved if squared is not None)

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, the same on all ranks; its parameters become those of node 0."""
        if self._is_ready:
            param_group.update({name: self.param_groups[0][name] for name in ("step", "mixes")})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param, name in zip(group["params"], names_of(self.param_groups)[-1], strict=True):
            check_parameter(param, name, self._world.topology)
            if isinstance(param, FlatParameter):
                raise InvalidArgumentError(
                    f"{name} is a flat parameter of FSDP1, which moves it in memory while it would be mixed: shard the "
                    f"model by FSDP2 (fully_shard)."
                )
            # Present before the first step: torch's checkpoints need it.
            self.state.setdefault(param, {})
        broadcast_parameters_(group["params"], self._world)
        if self._is_ready:
            self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, parameters included, with a node axis in every tensor: replicas differ.

        Mixes under way are not saved: they are started again from the parameters.
        """
        self._check_between_steps("saved")
        # States for parameters that have none yet come from a step, which changes parameters and changes them back.
        for bucket in self._buckets:
            bucket.wait_received()
        initial = self._inner.initial_states(self)
        for bucket in self._buckets:
            bucket.accept_changes()
        self.state.update(initial)
        saved: dict[str, Any] = super().state_dict()
        for bucket in self._buckets:
            bucket.save_(saved["state"], self._keys_in(saved), self._axis)
        self.state.update({param: {} for param in initial})
        return saved

    def load_state_dict(self, state_dict: dict[str, Any], other_nodes: OtherNodes | None = None) -> None:
        """Restore a state, parameters included, bit for bit. All ranks call it together.

        A state of another number of nodes is an ``"error"``, the default of ``other_nodes``; or all replicas get the
        ``"mean"``; or they are ``"reset"``, which keeps the model's parameters.
        """
        self._ready.reset()
        self.restart()
        self._refresh()
        check_sizes(state_dict["param_groups"], self.param_groups)
        if self._buckets and not any(state_dict["state"].values()):
            raise InvalidArgumentError("the state to be loaded holds no replica: it was saved by another optimizer.")
        keys, policy = self._keys_in(state_dict), other_nodes or DEFAULT_OTHER_NODES.get()
        states = {key: dict(state_dict["state"].get(key, {})) for key in keys.values()}
        # All of them before the first is called: a state that is refused changes nothing.
        commits = [commit for bucket in self._buckets for commit in bucket.load(states, keys, self._axis, policy)]
        with torch.no_grad():
            for commit in commits:
                commit()
        super().load_state_dict({"state": states, "param_groups": state_dict["param_groups"]})
        move_steps_to_host_(self)

    def _keys_in(self, state_dict: dict[str, Any]) -> dict[Parameter, Any]:
        packed = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        return dict(zip(params, packed, strict=True))

    def _check_between_steps(self, what: str) -> None:
        if self._ready.launched:
            raise InvalidArgumentError(
                f"this optimizer cannot be {what} between backward() and step(): with overlap='backward' some buckets "
                f"have stepped, others have not. Call step() first."
            )

    def __getstate__(self) -> dict[str, Any]:
        raise InvalidArgumentError(
            "a decentralized optimizer has process groups and hooks, and cannot be copied or pickled: make another, "
            "and load state_dict()."
        )

    def _refresh(self) -> None:
        """Plan buckets for parameters that were added or unfrozen. All ranks call it together."""
        params = {param for group in self.param_groups for param in group["params"] if param.requires_grad}
        new = params.difference(*(bucket.params for bucket in self._buckets))
        if not new:
            return
        buckets = bucket_parameters(self.param_groups, self._bucket_bytes, new.__contains__)
        check_same_buckets(buckets, self._world)
        settings = self._world, self.schedule, self._gamma, self._compressor, self._communicator
        self._buckets += [MixBucket(bucket, *settings) for bucket in buckets]
        self._ready.watch(list(self._buckets), early=self._overlap == "backward")

    def _prepare_gradients(self) -> None:
        """Unscale and clip gradients, if asked for; find out whether this replica skips its step."""
        # Set by torch's GradScaler during the step.
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None:
            found = torch.tensor(float(found_inf))
            # Other ranks may have found infinity in their shards of this replica.
            if self._world.intra.size > 1 and any(bucket.node_averaged for bucket in self._buckets):
                self._world.intra_control.all_reduce(found).wait()
            self._skips = bool(found)
        if scale is not None and self._overlap == "backward":
            raise InvalidArgumentError(
                "GradScaler unscales gradients after the backward pass, but overlap='backward' steps on them before: "
                "use overlap='step', or bfloat16, which needs no scaler."
            )
        if scale is not None:
            torch._foreach_div_([x for bucket in self._buckets for x in gradients_of(bucket)], scale)
        if self._max_norm is not None:
            clip_(self._buckets, self._world, self._max_norm)

    @torch.no_grad()
    def _advance(self, bucket: MixBucket) -> None:
        """Take a bucket through one iteration: finish its mix, step, start the next mix."""
        group = self.param_groups[bucket.group]
        next_mix = group["mixes"]
        if self._order == "mix-then-step" and group["step"] > 0:
            self._finish_mix(bucket, with_all=self._is_with_all("consensus_launched"))
            next_mix += self.rounds
        if not self._skips:
            # The step belongs to push-sum's numerators, of which the parameters are one over the weight.
            weight = 1.0 if bucket.push_sum is None else bucket.push_sum.weight
            lr = group["lr"] if weight == 1.0 else group["lr"] / weight
            self._optimizer.param_groups = [{**group, "params": list(bucket.params), "lr": lr}]
            self._optimizer.state = self.state
            self._optimizer.step()
        if self._order == "step-then-mix" or self._overlap != "none":
            bucket.start(next_mix, with_all=self._is_with_all("consensus_complete"))

    def _finish_mix(self, bucket: MixBucket, *, with_all: bool) -> None:
        """Finish the mix under way, which starts here if there is none, as after loading, and mix further rounds."""
        first = self.param_groups[bucket.group]["mixes"]
        for number in range(self.rounds):
            bucket.start(first + number, with_all=with_all and number == 0)
            bucket.finish()

    def _finish_step(self) -> None:
        """Count the step, and decide how much the next steps mix."""
        first = self.param_groups[0]
        if self._order == "step-then-mix":
            for bucket in self._buckets:
                self._finish_mix(bucket, with_all=self._is_with_all("consensus_complete"))
        mixes = self.rounds if self._order == "step-then-mix" or first["step"] > 0 else 0
        for group in self.param_groups:
            group["step"] += 1
            group["mixes"] += mixes
        first["consensus_launched"] = first["consensus_complete"]
        if self._control is not None and first["step"] % self._control.every == 0:
            distance = self._squared_distance(ranks=self._world.topology.local_size)
            norm = float(squared_norm(self._buckets, self._world))
            update_consensus_(first, self._control, self._world, distance, norm)

    def _is_with_all(self, mix: Literal["consensus_complete", "consensus_launched"]) -> bool:
        """Return whether the next mix or, as launched, the one under way is with all nodes."""
        return self._control is not None and bool(self.param_groups[0][mix])


class DecentralizedAdam(DecentralizedOptimizer):
    """Decentralized Adam (arXiv 2410.11998): ``x <- W x - lr * Adam(gradient at the unmixed x)``, with local moments.

    :class:`DecentralizedOptimizer` says more about the arguments from ``schedule`` on, and what is raised.

    Args:
        params: parameters, named parameters or parameter groups, as for torch's Adam.
        lr: the learning rate.
        betas: the decays of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: AdamW's or, with ``decoupled=False``, Adam's.
        schedule: the nodes that mix at each step.
        world: the ranks.
        accumulate: the number of steps after which moments are updated, by the mean gradient of these steps.
        decoupled: False adds weight decay to the gradient, as Adam does, instead of to the step.
        order: mix or step first.
        overlap: when a bucket steps and its mix starts.
        gamma: the share of the way from ``x`` to ``W x``.
        compressor: sends compressed changes of the parameters.
        max_norm: clips the norm of a replica's whole gradient.
        control: mixes more while replicas are too far apart.
        bucket_bytes: bytes of the parameters that are mixed together.
        foreach: as for torch's AdamW; ignored if ``accumulate`` is above 1.
        fused: as for torch's AdamW; ignored if ``accumulate`` is above 1.

    Example:
        >>> import torch, flexcomm
        >>> from flexdemo import DecentralizedAdam
        >>> model = torch.nn.Linear(2, 1)
        >>> with flexcomm.connect() as world:
        ...     optimizer = DecentralizedAdam(model.parameters(), lr=1e-3, world=world)
        ...     model(torch.ones(4, 2)).sum().backward()
        ...     optimizer.step()

    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        schedule: ScheduleLike | None = None,
        world: World | None = None,
        accumulate: int = 1,
        decoupled: bool = True,
        order: Order = "mix-then-step",
        overlap: Overlap = "step",
        gamma: float | None = None,
        compressor: Compressor | None = None,
        max_norm: float | None = None,
        control: ConsensusControl | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        adam: Optimizer
        if accumulate == 1:
            adam_class = AdamW if decoupled else Adam
            adam = adam_class(params, lr, betas, eps, weight_decay, foreach=foreach, fused=fused)
        else:
            adam = AccumAdam(params, lr, betas, eps, weight_decay, window=accumulate, decoupled=decoupled)
        super().__init__(
            adam,
            schedule,
            world=world,
            order=order,
            overlap=overlap,
            gamma=gamma,
            compressor=compressor,
            max_norm=max_norm,
            control=control,
            bucket_bytes=bucket_bytes,
        )
