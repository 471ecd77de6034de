"""What a bucket costs on a GPU, counted: launches, host reads and uploads, whatever the number of tensors and nodes.

The GPU's kernels run on the host, under :func:`flexcomm.hierarchical_sync` itself. Every read of a tensor counts, also
one that would not wait for a device; that a device is waited for once is in ``tests/ranks/test_stand_in_reads.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flexcomm
from bench.gpu.cuda_on_host import HostLauncher, compile_for_host
from flexcomm.device import to_device
from flexcomm.kernels import ReferenceKernels
from flexcomm.kernels.gpu import GpuKernels
from flexcomm.sync import plan as sync_plan
from flexcomm.topology import Topology
from flexcomm.transport import LoopbackTransport
from flexcomm.transport.base import Finished

if TYPE_CHECKING:
    from torch import Tensor

    from flexcomm import Compressor, World
    from flexcomm.kernels import Kernels
    from flexcomm.sync.algorithms import Algorithm

TENSORS, NODES = 100, 8
SHAPES = ((64, 64), (70, 9), (150,), (3,))
SPARSE = flexcomm.demo(k=8, chunk=64)
GATHERED, SUMMED = ["encode", "verify", "decode_store"], ["encode", "decode_store"]
COUNTED = ["count_chunks", "raise_thresholds", "count_chunks", "place_entries"]
READING_METHODS = ("tolist", "numpy", "cpu", "__array__")
READING_OPERATORS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}
"""``item`` and conversions to Python's numbers come to the first."""

Sync = Callable[[], object]
MakeSync = Callable[..., Sync]


class EqualNodes(LoopbackTransport):
    """The transport of one of several nodes that hold the same: what it sends, all have sent."""

    name = "equal nodes"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def _gather(self, source: Tensor, buffer: Tensor, *_: object) -> Finished:
        buffer.view(self.size, -1).copy_(source)
        return Finished()

    def _sum(self, buffer: Tensor) -> Finished:
        buffer *= self.size
        return Finished()

    _start_all_gather = _start_all_gatherv = _gather
    _start_all_reduce = _sum


class Costs(TorchDispatchMode):
    """What was launched, read and uploaded while this was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.reads, self.uploads = list[str](), list[str](), list[int]()
        self._patch = pytest.MonkeyPatch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.overloadpacket.__name__ in READING_OPERATORS:
            self.reads.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Self:
        for name in READING_METHODS:
            self._patch.setattr(torch.Tensor, name, self._counting(name))
        for name, module in list(sys.modules.items()):
            if name.startswith("flexcomm.") and getattr(module, "to_device", None) is to_device:
                self._patch.setattr(module, "to_device", self._upload)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def _counting(self, name: str) -> Callable[..., Any]:
        read = getattr(torch.Tensor, name)

        def count(x: Tensor, *args: Any, **options: Any) -> Any:
            self.reads.append(name)
            return read(x, *args, **options)

        return count

    def _upload(self, x: Tensor, device: torch.device) -> Tensor:
        self.uploads.append(x.nbytes)
        return to_device(x, device)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> HostLauncher:
    return HostLauncher(compile_for_host(tmp_path_factory.mktemp("cuda")))


@pytest.fixture
def make_sync(launcher: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> MakeSync:
    """Give what makes a sync that can be repeated, after memory and tables of its first calls are there."""

    def make(
        compressor: Compressor,
        algorithm: Algorithm = "gather",
        tensors: int = TENSORS,
        nodes: int = NODES,
        bucket_bytes: int | None = None,
        kernels: Kernels | None = None,
        *,
        has_outputs: bool = True,
    ) -> Sync:
        monkeypatch.setattr(sync_plan, "choose_kernels", lambda _: kernels or GpuKernels(launcher))
        xs = [torch.ones(SHAPES[number % len(SHAPES)]) for number in range(tensors)]
        options: dict[str, Any] = {"world": among_equal_nodes(nodes), "residuals": flexcomm.Residuals()}
        options |= {"algorithm": algorithm, "bucket_bytes": bucket_bytes}
        options |= {"out": [torch.empty_like(x) for x in xs]} if has_outputs else {}
        sync = partial(flexcomm.hierarchical_sync, xs, compressor, **options)
        # Outputs that a call returns live until the next one has its own.
        earlier = [sync() for _ in range(2)]
        return lambda: (earlier, sync())

    return make


def among_equal_nodes(nodes: int) -> World:
    """Return a world of so many nodes, of which this is one and the others are told apart by nothing."""
    inter, topology = EqualNodes(nodes), Topology(0, tuple((rank,) for rank in range(nodes)), "none")
    return replace(flexcomm.connect(), topology=topology, inter=inter, inter_control=inter)


def costs_of(sync: Sync, launcher: HostLauncher) -> Costs:
    launcher.launches.clear()
    with Costs() as costs:
        sync()
    costs.launches += launcher.launches
    return costs


@pytest.mark.parametrize(("tensors", "nodes"), [(1, 2), (TENSORS, NODES)])
@pytest.mark.parametrize(
    ("compressor", "algorithm", "launches", "reads", "uploads"),
    [
        (SPARSE, "gather", GATHERED, 1, 0),
        # Lengths depend on the data, and so do the tables of where payloads are.
        (
            flexcomm.threshold(0.5, capacity=None),
            "gatherv",
            [*COUNTED, "encode", "seal", "locate", *GATHERED[1:]],
            2,
            5,
        ),
        # The digest that is sent, and the one that is expected, change with the step; so do sample keys.
        (flexcomm.random_k(1 / 16), "reduce", SUMMED, 1, 2 + 2),
        # Here states are not updated in place, but two take turns.
        (flexcomm.dense(), "dense", SUMMED, 1, 2 + 1),
    ],
    ids=["gather", "gatherv", "reduce", "dense"],
)
def test_a_bucket_keeps_its_budget(
    compressor: Compressor,
    algorithm: Algorithm,
    launches: list[str],
    reads: int,
    uploads: int,
    tensors: int,
    nodes: int,
    launcher: HostLauncher,
    make_sync: MakeSync,
) -> None:
    costs = costs_of(make_sync(compressor, algorithm, tensors, nodes), launcher)
    assert costs.launches == launches
    assert costs.reads == ["tolist"] * reads
    assert len(costs.uploads) == uploads


def test_several_buckets_cost_as_much_each(launcher: HostLauncher, make_sync: MakeSync) -> None:
    costs = costs_of(make_sync(SPARSE, bucket_bytes=100_000), launcher)
    buckets = costs.launches.count("encode")
    assert buckets > 2
    assert sorted(costs.launches) == sorted(GATHERED * buckets)
    assert costs.reads == ["tolist"] * buckets
    assert costs.uploads == []


def test_addresses_are_uploaded_where_they_change(launcher: HostLauncher, make_sync: MakeSync) -> None:
    """New outputs are told to who decodes; what is the same as a call before is not told again."""
    costs = costs_of(make_sync(SPARSE, has_outputs=False), launcher)
    assert len(costs.uploads) == 1


def test_the_references_reads_are_counted(launcher: HostLauncher, make_sync: MakeSync) -> None:
    """One for each tensor and node at least."""
    tensors, nodes = 12, 4
    costs = costs_of(make_sync(SPARSE, "gather", tensors, nodes, kernels=ReferenceKernels()), launcher)
    assert len(costs.reads) > tensors * nodes
    assert costs.launches == []


@pytest.mark.parametrize("read", ["item", "__int__", "__bool__", "tolist", "cpu", "numpy"])
def test_a_read_is_counted(read: str, launcher: HostLauncher) -> None:
    x = torch.ones(1)
    assert len(costs_of(lambda: getattr(x, read)(), launcher).reads) == 1
