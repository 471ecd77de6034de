"""Calibration: a short run on the cluster itself that measures links, compute times and compression.

All ranks call everything together. Times are medians of the slowest rank's, and equal on every rank.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Protocol

import torch
from torch import Tensor, nn

import flexcomm
from flexcomm import TensorSpec, World, demo
from flexcomm.codec import decode_bucket_, encode_bucket_, plan_buffer, regions_of
from flexcomm.kernels import StateUpdate, choose_kernels
from flexdemo.predict import PredictError
from flexdemo.predict.calibration import Calibration, CodecTiming, Compute, fit_compression, write_calibration
from flexdemo.runtime import Compression, LinkTable


def calibrate(file: Path, workload: str | None = None, compute: Compute | None = None) -> tuple[bool, Calibration]:
    """Measure on all ranks that were started, and write ``file`` on rank 0.

    Args:
        file: the calibration file.
        workload: ``package.module:function`` that returns a ``TrainingStep`` to time; a small transformer if None.
        compute: compute times that are known already; nothing is timed then.

    Returns:
        Whether this is rank 0, and the measurements.

    """
    # Before ranks join: one that fails alone afterwards leaves the others waiting.
    step = load_workload(workload) if workload else None
    with flexcomm.connect() as world:
        world.agree({"workload": workload, "compute": None if compute is None else str(compute)})
        if compute is None:
            step = step or SmallTransformer(world.device)
            compute = measure_compute(world, step, workload or SmallTransformer.NAME)
        calibration = measure(world, compute)
        is_first = world.topology.rank == 0
        remarks = _describe(world)
    if is_first:
        write_calibration(calibration, remarks, file)
    return is_first, calibration


def measure(world: World, compute: Compute) -> Calibration:
    """Measure links and compression, and return them with the given compute times."""
    topology = world.topology
    return Calibration(
        nodes=topology.nodes,
        ranks_per_node=topology.local_size,
        links=measure_links(world),
        compute=compute,
        codec=measure_codec(world),
    )


def _describe(world: World) -> dict[str, object]:
    """Return the circumstances of the run; nothing that identifies the machine."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "launcher": world.topology.launcher,
        "inter": world.inter.name,
        "intra": world.intra.name,
        "device": world.device.type,
        "flexcomm": flexcomm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _time(call: Callable[[], object], world: World) -> float:
    begin_s = time.perf_counter()
    call()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin_s


def _time_slowest(call: Callable[[], object], world: World, repeats: int) -> float:
    """Return the median over calls of the slowest rank's seconds; the first call, which may compile, does not count."""
    taken_s = torch.zeros(repeats + 1, dtype=torch.float64)
    for repeat in range(repeats + 1):
        world.control.barrier().wait()
        taken_s[repeat] = _time(call, world)
    slowest_s: list[float] = world.control.all_gather(taken_s).wait().amax(dim=0).tolist()
    return median(slowest_s[1:])


# Links

LINK_SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
_LINK_REPEATS = 5
_MAX_CALL_S = 2.0
"""After a call that takes longer, larger sizes are left out: they are extrapolated from the last two."""


def measure_links(
    world: World, sizes: Sequence[int] = LINK_SIZES, repeats: int = _LINK_REPEATS
) -> tuple[LinkTable, ...]:
    """Return a table for each type of exchange that this cluster has; ``sizes`` are bytes of a node, ascending."""
    nodes, local_size = world.topology.nodes, world.topology.local_size
    exchanges: list[tuple[str, int, Callable[[World, int], Callable[[], object]]]] = []
    if nodes > 1:
        exchanges = [("group", 2, _send_to_partner), ("all-reduce", nodes, _all_reduce), ("gather", nodes, _gather)]
    if nodes > 2:
        exchanges.append(("edges", 1, _send_to_next))
    if local_size > 1:
        exchanges.append(("intra", local_size, _intra_legs))
    tables = []
    for link, k, prepare in exchanges:
        seconds: list[float] = []
        for size in sizes:
            seconds.append(_time_slowest(prepare(world, size), world, repeats))
            if seconds[-1] > _MAX_CALL_S:
                break
        tables.append(LinkTable(link, k, tuple(sizes[: len(seconds)]), tuple(seconds)))
    return tuple(tables)


def _shard(world: World, nbytes: int) -> Tensor:
    """Return a rank's shard of a node's bytes; all ranks of a node send at once, as in training."""
    return torch.zeros(max(1, nbytes // 4 // world.topology.local_size), device=world.device)


def _send_to_partner(world: World, nbytes: int) -> Callable[[], object]:
    mine = _shard(world, nbytes)
    theirs, partner = torch.empty_like(mine), world.inter.rank ^ 1
    # With an odd number of nodes the last has no partner.
    peers = [partner] if partner < world.inter.size else []
    return lambda: world.inter.send_recv([(peer, mine) for peer in peers], [(peer, theirs) for peer in peers]).wait()


def _send_to_next(world: World, nbytes: int) -> Callable[[], object]:
    inter, mine = world.inter, _shard(world, nbytes)
    theirs, after, before = torch.empty_like(mine), (inter.rank + 1) % inter.size, (inter.rank - 1) % inter.size
    return lambda: inter.send_recv([(after, mine)], [(before, theirs)]).wait()


def _all_reduce(world: World, nbytes: int) -> Callable[[], object]:
    mine = _shard(world, nbytes)
    return lambda: world.inter.all_reduce(mine).wait()


def _gather(world: World, nbytes: int) -> Callable[[], object]:
    mine = _shard(world, nbytes)
    out = mine.new_empty(world.inter.size, mine.numel())
    return lambda: world.inter.all_gather(mine, out).wait()


def _intra_legs(world: World, nbytes: int) -> Callable[[], object]:
    shard = _shard(world, nbytes)
    whole = shard.new_zeros(world.intra.size, shard.numel())

    def both() -> None:
        world.intra.reduce_scatter(whole, shard).wait()
        world.intra.all_gather(shard, whole).wait()

    return both


# Compression

CODEC_KS = (8, 32, 128)
_CHUNK = 64
_SIDE = 1024
_PAYLOADS = (2, 16)
_CODEC_REPEATS = 7


def measure_codec(world: World, ks: Sequence[int] = CODEC_KS) -> tuple[Compression, ...]:
    """Return the costs of ``demo(k)`` for each k, on a shard of a million elements.

    No data is exchanged, but all ranks measure at once, as they encode at once in training.
    """
    draw = torch.Generator().manual_seed(world.topology.rank)
    x = torch.randn(_SIDE, _SIDE, generator=draw).to(world.device)
    return tuple(_measure_compression(world, x, k) for k in ks)


def _measure_compression(world: World, x: Tensor, k: int) -> Compression:
    plan = plan_buffer((TensorSpec("x", tuple(x.shape), x.dtype),), demo(k, _CHUNK))
    kernels, out = choose_kernels(x.device), torch.empty_like(x)
    state = torch.zeros(plan.plans[0].state_shape, device=x.device)
    update = StateUpdate(decay=0.999)
    buffer = torch.zeros(plan.nbytes, dtype=torch.uint8, device=x.device)

    def encode() -> None:
        encode_bucket_(plan, [x], buffer, step=0, sequence=0, kernels=kernels, states=[state], update=update)

    def prepare_decode(payloads: int) -> Callable[[], None]:
        # Copies of one payload take as long to decode as different ones.
        gathered = buffer.repeat(payloads)
        regions = regions_of([f"node {node}" for node in range(payloads)], [plan.nbytes] * payloads)
        return lambda: decode_bucket_(
            plan, gathered, regions, [out], step=0, sequence=0, kernels=kernels, average="contributors"
        )

    encode_s = _time_slowest(encode, world, _CODEC_REPEATS)
    decode_s = {payloads: _time_slowest(prepare_decode(payloads), world, _CODEC_REPEATS) for payloads in _PAYLOADS}
    return fit_compression(CodecTiming(k, _CHUNK, x.numel(), plan.nbytes, encode_s, decode_s))


# Compute times

_ITERATIONS = 20
_WARMUPS = 3


class TrainingStep(Protocol):
    """A workload on this rank's device, in three phases that must not communicate with other ranks."""

    @property
    def nbytes(self) -> int:
        """The bytes of the model that all ranks of a node exchange together, such as 4 for each fp32 parameter."""
        ...

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def step(self) -> None:
        """Step the optimizer, and clear the gradients."""
        ...


class SmallTransformer:
    """Four layers of 256, four sequences of 128 tokens, AdamW."""

    NAME = "a transformer of 3.2 M parameters, 512 tokens"

    def __init__(self, device: torch.device) -> None:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(4, 128, 256, generator=torch.Generator().manual_seed(0)).to(device)
        self.loss: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(param.nbytes for param in self.model.parameters())

    def forward(self) -> None:
        self.loss = self.model(self.batch).square().mean()

    def backward(self) -> None:
        assert self.loss is not None, "forward comes first"  # noqa: S101  (our own invariant)
        self.loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def load_workload(text: str) -> TrainingStep:
    """Return the result of the function that ``package.module:function`` names."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise PredictError(f"got --workload {text!r}, needed package.module:function.")
    try:
        made = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise PredictError(f"cannot load --workload {text!r}: {error}.") from error
    missing = [part for part in ("forward", "backward", "step", "nbytes") if not hasattr(made, part)]
    if missing:
        raise PredictError(
            f"--workload {text!r} returned a {type(made).__name__} without {', '.join(missing)}: needed methods "
            f"forward(), backward() and step(), and the model's bytes as nbytes."
        )
    workload: TrainingStep = made
    return workload


def measure_compute(world: World, workload: TrainingStep, name: str, iterations: int = _ITERATIONS) -> Compute:
    """Return the compute times of a node, which takes as long as the slowest of its ranks."""
    seen = torch.zeros(iterations, 3, dtype=torch.float64)
    for iteration in range(-_WARMUPS, iterations):
        taken_s = [_time(part, world) for part in (workload.forward, workload.backward, workload.step)]
        if iteration >= 0:
            seen[iteration] = torch.tensor(taken_s, dtype=torch.float64)
    by_rank = world.control.all_gather(seen).wait()
    by_node = torch.stack([by_rank[list(ranks)].amax(dim=0) for ranks in world.topology.members])
    return summarise_compute(by_node, name, workload.nbytes)


def summarise_compute(by_node: Tensor, name: str, model_nbytes: int) -> Compute:
    """Return means and variation of ``[nodes, iterations, 3]`` seconds of forward, backward and optimizer."""
    forward_s, backward_s, optimizer_s = by_node.mean(dim=(0, 1)).tolist()
    passes_s = by_node[:, :, :2].sum(dim=2)
    means_s = passes_s.mean(dim=1)
    relative = passes_s / means_s[:, None] - 1
    return Compute(
        name=name,
        model_nbytes=model_nbytes,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        sigma=float(relative.square().mean().sqrt()),
        slowness=tuple((means_s / means_s.mean()).tolist()),
    )
