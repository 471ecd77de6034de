"""Calibration: measures links, compute times and compression on the cluster itself; all ranks call together."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Protocol

import torch
from torch import Tensor, nn

import flexcomm
from flexcomm import InvalidArgumentError, TensorSpec, World, demo
from flexcomm.codec import decode_bucket_, encode_bucket_, plan_buffer, regions_of
from flexcomm.kernels import StateUpdate, choose_kernels
from flexdemo.predict.calibration import Calibration, CodecTiming, Compute, fit_compressions, write_calibration
from flexdemo.runtime import Compression, LinkTable

LINK_SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
_LINK_REPEATS = 5
_MAX_CALL_S = 2.0
"""After a call that takes longer, larger sizes are left out: they are extrapolated from the last two."""

CODEC_KS = (8, 32, 128)
_CHUNK = 64
_SIDE = 1024
_PAYLOADS = (2, 16)
_CODEC_REPEATS = 7
_ITERATIONS = 20
_WARMUPS = 3


def calibrate(file: Path, workload: str | None = None, compute: Compute | None = None) -> tuple[bool, Calibration]:
    """Measure on all ranks, write ``file`` on rank 0, and return whether this is rank 0 and the measurements.

    ``workload`` is the ``package.module:function`` that returns a ``TrainingStep`` to time, by default a small
    transformer. Nothing is timed if ``compute`` times are given.
    """
    # Before ranks join: one that fails alone afterwards leaves the others waiting.
    step = load_workload(workload) if workload else None
    with flexcomm.connect() as world:
        world.agree({"workload": workload, "compute": None if compute is None else str(compute)})
        if compute is None:
            step = step or SmallTransformer(world.device)
            compute = measure_compute(world, step, workload or SmallTransformer.NAME)
        topology, links, codec = world.topology, measure_links(world), measure_codec(world)
        calibration = Calibration(topology.nodes, topology.local_size, links, compute, codec)
        # Nothing that identifies the machine.
        remarks = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "launcher": topology.launcher,
            "inter": world.inter.name,
            "intra": world.intra.name,
            "device": world.device.type,
            "flexcomm": flexcomm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    if topology.rank == 0:
        write_calibration(calibration, remarks, file)
    return topology.rank == 0, calibration


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


def measure_links(world: World) -> tuple[LinkTable, ...]:
    """Return a table for each type of exchange that this cluster has."""
    tables = []
    for link, k in _plan_exchanges(world, LINK_SIZES[0]):
        seconds: list[float] = []
        for size in LINK_SIZES:
            seconds.append(_time_slowest(_plan_exchanges(world, size)[link, k], world, _LINK_REPEATS))
            if seconds[-1] > _MAX_CALL_S:
                break
        tables.append(LinkTable(link, k, LINK_SIZES[: len(seconds)], tuple(seconds)))
    return tuple(tables)


def _plan_exchanges(world: World, nbytes: int) -> dict[tuple[str, int], Callable[[], object]]:
    """Return a call for each (link, k) with ``nbytes`` of a node; all its ranks send at once, as in training."""
    inter, intra = world.inter, world.intra
    shard = torch.zeros(max(1, nbytes // 4 // intra.size), device=world.device)
    received = torch.empty_like(shard)
    of_nodes, of_ranks = (shard.new_zeros(group.size, shard.numel()) for group in (inter, intra))
    # With an odd number of nodes the last has no partner.
    partners = [inter.rank ^ 1] if inter.rank ^ 1 < inter.size else []
    sends, receives = [(peer, shard) for peer in partners], [(peer, received) for peer in partners]
    after, before = (inter.rank + 1) % inter.size, (inter.rank - 1) % inter.size

    def intra_legs() -> None:
        intra.reduce_scatter(of_ranks, shard).wait()
        intra.all_gather(shard, of_ranks).wait()

    calls: dict[tuple[str, int], Callable[[], object]] = {}
    if inter.size > 1:
        calls["group", 2] = lambda: inter.send_recv(sends, receives).wait()
        calls["all-reduce", inter.size] = lambda: inter.all_reduce(shard).wait()
        calls["gather", inter.size] = lambda: inter.all_gather(shard, of_nodes).wait()
    if inter.size > 2:
        calls["edges", 1] = lambda: inter.send_recv([(after, shard)], [(before, received)]).wait()
    if intra.size > 1:
        calls["intra", intra.size] = intra_legs
    return calls


def measure_codec(world: World) -> tuple[Compression, ...]:
    """Return the costs of ``demo(k)`` for each k; all ranks measure at once, as they encode at once in training."""
    draw = torch.Generator().manual_seed(world.topology.rank)
    x = torch.randn(_SIDE, _SIDE, generator=draw).to(world.device)
    # Each k by itself: its decoding costs are told apart by few and many payloads.
    return tuple(fit_compressions([_time_codec(world, x, k)])[0] for k in CODEC_KS)


def _time_codec(world: World, x: Tensor, k: int) -> CodecTiming:
    plan = plan_buffer((TensorSpec("x", tuple(x.shape), x.dtype),), demo(k, _CHUNK))
    kernels, states = choose_kernels(x.device), [torch.zeros(plan.plans[0].state_shape, device=x.device)]
    buffer, out = torch.zeros(plan.nbytes, dtype=torch.uint8, device=x.device), torch.empty_like(x)
    update = StateUpdate(decay=0.999)

    def encode() -> None:
        encode_bucket_(plan, [x], buffer, step=0, sequence=0, kernels=kernels, states=states, update=update)

    encode_s, decode_s = _time_slowest(encode, world, _CODEC_REPEATS), {}
    for payloads in _PAYLOADS:
        # Copies of one payload take as long to decode as different ones.
        gathered = buffer.repeat(payloads)
        regions = regions_of([f"node {node}" for node in range(payloads)], [plan.nbytes] * payloads)
        decode = partial(decode_bucket_, plan, gathered, regions, [out], step=0, sequence=0, kernels=kernels)
        decode_s[payloads] = _time_slowest(partial(decode, average="contributors"), world, _CODEC_REPEATS)
    return CodecTiming(k, _CHUNK, x.numel(), plan.nbytes, encode_s, decode_s)


class TrainingStep(Protocol):
    """A workload on this rank's device, in three phases that must not communicate with other ranks.

    ``nbytes`` are those that all ranks of a node exchange together. ``step`` also clears the gradients.
    """

    nbytes: int

    def forward(self) -> None: ...
    def backward(self) -> None: ...
    def step(self) -> None: ...


class SmallTransformer:
    """Four layers of 256, four sequences of 128 tokens, AdamW."""

    NAME = "a transformer of 3.2 M parameters, 512 tokens"

    def __init__(self, device: torch.device) -> None:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(4, 128, 256, generator=torch.Generator().manual_seed(0)).to(device)
        self.nbytes = sum(param.nbytes for param in self.model.parameters())

    def forward(self) -> None:
        self.loss: Tensor = self.model(self.batch).square().mean()

    def backward(self) -> None:
        self.loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def load_workload(text: str) -> TrainingStep:
    """Return the result of the function that ``package.module:function`` names."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise InvalidArgumentError(f"got --workload {text!r}, needed package.module:function.")
    try:
        workload: TrainingStep = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(f"cannot load --workload {text!r}: {error}.") from error
    missing = [part for part in ("forward", "backward", "step", "nbytes") if not hasattr(workload, part)]
    if missing:
        raise InvalidArgumentError(f"--workload {text!r} returned an object without {', '.join(missing)}: add them.")
    return workload


def measure_compute(world: World, workload: TrainingStep, name: str, iterations: int = _ITERATIONS) -> Compute:
    """Return the compute times of a node, which takes as long as the slowest of its ranks."""
    parts = workload.forward, workload.backward, workload.step
    taken_s = [[_time(part, world) for part in parts] for _ in range(_WARMUPS + iterations)]
    by_rank = world.control.all_gather(torch.tensor(taken_s[_WARMUPS:], dtype=torch.float64)).wait()
    by_node = torch.stack([by_rank[list(ranks)].amax(dim=0) for ranks in world.topology.members])
    return summarise_compute(by_node, name, workload.nbytes)


def summarise_compute(by_node: Tensor, name: str, model_nbytes: int) -> Compute:
    """Return means and variation of ``[nodes, iterations, 3]`` seconds of forward, backward and optimizer."""
    forward_s, backward_s, optimizer_s = by_node.mean(dim=(0, 1)).tolist()
    passes_s = by_node[:, :, :2].sum(dim=2)
    means_s = passes_s.mean(dim=1)
    sigma = (passes_s / means_s[:, None] - 1).square().mean().sqrt().item()
    slowness = tuple((means_s / means_s.mean()).tolist())
    return Compute(name, model_nbytes, forward_s, backward_s, optimizer_s, sigma, slowness)
