"""DecentralizedAdam: Adam on every replica, whose parameters are mixed with those of a few other nodes."""

from __future__ import annotations

from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from flexcomm import BUCKET_BYTES, Compressor, World
from flexcomm.gossip import ScheduleLike
from flexdemo.accumulated import AccumAdam
from flexdemo.decentralized.consensus import ConsensusControl
from flexdemo.decentralized.optimizer import DecentralizedOptimizer, Order, Overlap


class DecentralizedAdam(DecentralizedOptimizer):
    """Decentralized Adam (arXiv 2410.11998): ``x <- W x - lr * Adam(gradient at the unmixed x)``, with local moments.

    :class:`DecentralizedOptimizer` says what a replica is, and more about the arguments from ``schedule`` on.

    Args:
        params: parameters, named parameters or parameter groups, as for torch's Adam.
        lr: the learning rate.
        betas: the decays of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: AdamW's or, with ``decoupled=False``, Adam's.
        schedule: the nodes that mix at each step; ``flexcomm.gossip.base(nodes)`` if not given.
        world: the ranks; those that ``flexcomm.connect()`` finds, if none are given.
        accumulate: the number of steps after which moments are updated, by the mean gradient of these steps; small
            local batches then count like larger ones. 1 is plain Adam.
        decoupled: False adds weight decay to the gradient, as Adam does, instead of to the step.
        order: ``"mix-then-step"``, or ``"step-then-mix"``, which waits for every mix.
        overlap: when a bucket steps and its mix starts: in ``"step"``, in ``"backward"``, or ``"none"`` for no overlap.
        gamma: the share of the way from ``x`` to ``W x``.
        compressor: sends compressed changes of the parameters; needs a fixed schedule.
        max_norm: clips the norm of a replica's whole gradient.
        control: mixes more while replicas are too far apart.
        bucket_bytes: bytes of the parameters that are mixed together.
        foreach: as for torch's AdamW; ignored if ``accumulate`` is above 1.
        fused: as for torch's AdamW; ignored if ``accumulate`` is above 1.

    Raises:
        InvalidArgumentError: arguments do not go together, or a parameter cannot be mixed.
        ConfigMismatchError: ranks passed different parameters or arguments.

    Example:
        >>> import torch, flexcomm
        >>> from flexdemo import DecentralizedAdam
        >>> model = torch.nn.Linear(2, 1)
        >>> with flexcomm.connect() as world:
        ...     schedule = flexcomm.gossip.alternating_exponential_ring(world.topology.nodes)
        ...     optimizer = DecentralizedAdam(model.parameters(), lr=1e-3, schedule=schedule, world=world)
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
