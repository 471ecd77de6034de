"""Routes: tensors fill buckets by dtype and size, and go the way on which a node sends the fewest bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import flexcomm
from flexcomm import InvalidArgumentError, TensorSpec
from flexcomm.sync.plan import BucketPlan, SyncSettings, fill_buckets, plan_buckets, sum_dtype

if TYPE_CHECKING:
    from flexcomm import AlgorithmOption, Compressor

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
LARGE = (TensorSpec("large", (512, 512), F32),)
NODES = (2, 3, 4, 8, 16, 64)
SIZES = (1, 100, 1 << 20)


def settings(
    specs: tuple[TensorSpec, ...],
    compressor: Compressor,
    algorithm: AlgorithmOption = "auto",
    bucket_bytes: int = 1 << 20,
) -> SyncSettings:
    return SyncSettings(specs, compressor, "nodes", algorithm, "raise", bucket_bytes, has_residuals=False)


def ways(compressor: Compressor) -> list[str]:
    """The way of a large matrix, by the number of nodes."""
    return [plan_buckets(settings(LARGE, compressor), nodes, 1)[0].algorithm for nodes in NODES]


def numbers_by_bucket(specs: tuple[TensorSpec, ...], bucket_bytes: int) -> list[tuple[int, ...]]:
    asked = settings(specs, flexcomm.dense(), bucket_bytes=bucket_bytes)
    return [bucket.tensors for bucket in plan_buckets(asked, 2, 1)]


def test_neighbours_share_a_bucket_until_it_is_full() -> None:
    specs = tuple(TensorSpec(f"t{number}", (100,), F32) for number in range(5))
    assert numbers_by_bucket(specs, 800) == [(0, 1), (2, 3), (4,)]
    assert numbers_by_bucket(specs, 799) == [(0,), (1,), (2,), (3,), (4,)]
    assert numbers_by_bucket(specs, 1 << 20) == [(0, 1, 2, 3, 4)]


def test_a_tensor_larger_than_a_bucket_is_alone_and_nothing_takes_no_room() -> None:
    shapes = ((0,), (1000,), (0,), (3,), ())
    specs = tuple(TensorSpec(f"t{number}", shape, F32) for number, shape in enumerate(shapes))
    assert numbers_by_bucket(specs, 16) == [(0, 1), (2, 3, 4)]


def test_a_bucket_holds_one_dtype() -> None:
    dtypes = (F32, F32, BF16, F64, F32)
    specs = tuple(TensorSpec(f"t{number}", (10,), dtype) for number, dtype in enumerate(dtypes))
    assert numbers_by_bucket(specs, 1 << 20) == [(2,), (3,), (0, 1, 4)]
    buckets = plan_buckets(settings(specs, flexcomm.dense()), 2, 1)
    assert [bucket.dtype for bucket in buckets] == [BF16, F64, F32]


def test_gpt2_travels_in_26_buckets_of_which_none_is_small() -> None:
    n = 768
    block = [(n,), (n,), (n, 3 * n), (3 * n,), (n, n), (n,), (n,), (n,), (n, 4 * n), (4 * n,), (4 * n, n), (n,)]
    shapes = [(50257, n), (1024, n), *(shape for _ in range(12) for shape in block), (n,), (n,)]
    specs = [TensorSpec(str(number), shape, F32) for number, shape in enumerate(reversed(shapes))]
    sizes = [
        sum(4 * torch.Size(specs[number].shape).numel() for number in one) for one in fill_buckets(specs, 16 << 20)
    ]
    assert len(sizes) == 26
    assert min(sizes[:-1]) >= 1 << 20


def test_no_tensors_make_no_buckets() -> None:
    assert plan_buckets(settings((), flexcomm.demo()), 2, 2) == ()


def test_shared_indices_are_reduced_from_three_nodes_on() -> None:
    assert ways(flexcomm.random_k(0.1)) == ways(flexcomm.striding(1 / 16)) == ["gather"] + ["reduce"] * 5
    assert ways(flexcomm.dense()) == ["gather"] + ["reduce"] * 5


def test_few_coefficients_of_their_own_are_gathered() -> None:
    """1/64 of the elements, in 22 bits or so each: among 64 nodes that is still less than two of 32 bits for all."""
    assert ways(flexcomm.top_k(1 / 64)) == ["gather"] * 6
    assert ways(flexcomm.demo()) == ["gather"] * 6


def test_many_coefficients_of_their_own_are_split_where_nodes_are_many() -> None:
    """What all nodes select of a chunk is the chunk at most, so averages take no more than sums would."""
    assert ways(flexcomm.top_k(1 / 4)) == ["gather"] * 3 + ["two_phase"] * 3
    assert ways(flexcomm.sign()) == ["gather"] * 5 + ["two_phase"]


def test_what_takes_more_bytes_than_everything_is_sent_whole() -> None:
    """A threshold cannot be split: what a share of a tensor may send is not known."""
    assert ways(flexcomm.threshold(1.0, capacity=0.25)) == ["gather"] * 4 + ["dense"] * 2


def test_lengths_that_depend_on_the_data_are_told() -> None:
    assert ways(flexcomm.threshold(1.0, capacity=None)) == ["gatherv"] * 6


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("compressor", [flexcomm.demo(), flexcomm.top_k(0.25), flexcomm.random_k(0.5)], ids=str)
def test_the_way_that_is_chosen_sends_the_fewest_bytes(compressor: Compressor, nodes: int) -> None:
    (chosen,) = flexcomm.choose_algorithms(LARGE, compressor, nodes).values()
    assert chosen.sent_bytes[chosen.algorithm] == min(chosen.sent_bytes.values())
    assert plan_buckets(settings(LARGE, compressor), nodes, 1)[0].algorithm == chosen.algorithm


@pytest.mark.parametrize("nodes", NODES)
def test_the_size_of_buckets_does_not_change_the_way(nodes: int) -> None:
    """Alone, the small tensors would go another way than the large one: what is sent of them would not be the same."""
    specs = (*LARGE, TensorSpec("bias", (7,), F32), TensorSpec("number", (), F32), TensorSpec("norm", (90,), BF16))
    for compressor in (flexcomm.demo(), flexcomm.top_k(0.5), flexcomm.threshold(1.0), flexcomm.random_k(0.1)):
        first, *others = (algorithms_by_tensor(settings(specs, compressor, bucket_bytes=size), nodes) for size in SIZES)
        assert all(other == first for other in others)


def algorithms_by_tensor(asked: SyncSettings, nodes: int) -> dict[int, str]:
    return {number: bucket.algorithm for bucket in plan_buckets(asked, nodes, 1) for number in bucket.tensors}


@pytest.mark.parametrize(
    ("algorithm", "compressor"),
    [
        ("reduce", flexcomm.demo()),
        ("reduce", flexcomm.top_k(0.1)),
        ("reduce", flexcomm.random_k(0.1, values="int8")),
        ("reduce", flexcomm.sign()),
        ("two_phase", flexcomm.random_k(0.1)),
        ("two_phase", flexcomm.threshold(1.0)),
        ("gather", flexcomm.threshold(1.0, capacity=None)),
    ],
    ids=str,
)
def test_a_way_that_cannot_be_gone_is_refused(algorithm: AlgorithmOption, compressor: Compressor) -> None:
    with pytest.raises(
        InvalidArgumentError, match=f"algorithm '{algorithm}' cannot carry this compressor, but .*dense"
    ):
        plan_buckets(settings(LARGE, compressor, algorithm), 4, 1)


@pytest.mark.parametrize(("values", "most"), [("bf16", 1 << 8), ("fp16", 1 << 11), ("fp32", 1 << 24)])
def test_sums_are_refused_where_their_type_cannot_count_the_nodes(values: str, most: int) -> None:
    compressor = flexcomm.random_k(0.1, values=values)  # type: ignore[arg-type]
    assert plan_buckets(settings(LARGE, compressor, "reduce"), most, 1)[0].algorithm == "reduce"
    with pytest.raises(InvalidArgumentError, match="'reduce' cannot carry"):
        plan_buckets(settings(LARGE, compressor, "reduce"), most + 1, 1)


@pytest.mark.parametrize("algorithm", ["gather", "gatherv", "two_phase", "dense"])
def test_a_way_that_can_be_gone_is_gone_when_it_is_asked_for(algorithm: AlgorithmOption) -> None:
    assert plan_buckets(settings(LARGE, flexcomm.demo(), algorithm), 4, 1)[0].algorithm == algorithm


def test_payloads_are_handed_on_inside_a_node_where_they_are_shorter_than_elements() -> None:
    def forwards(compressor: Compressor, nodes: int, algorithm: AlgorithmOption = "auto") -> bool:
        return plan_buckets(settings(LARGE, compressor, algorithm), nodes, 2)[0].gathers_payloads

    assert forwards(flexcomm.demo(), 4)
    assert forwards(flexcomm.sign(), 8, "gather")
    assert not forwards(flexcomm.sign(), 64, "gather")
    assert not forwards(flexcomm.dense(), 2)
    assert not forwards(flexcomm.random_k(0.01), 4)


def test_every_rank_of_a_node_gets_a_part_and_sums_are_taken_in_enough_bits() -> None:
    specs = (TensorSpec("w", (300, 40), BF16), TensorSpec("empty", (0,), BF16), TensorSpec("b", (9,), BF16))
    bucket: BucketPlan = plan_buckets(settings(specs, flexcomm.demo()), 2, 3)[0]
    assert sorted(number for shards in bucket.shards for number, _ in shards) == [0, 0, 0, 2]
    assert {shard.spec.dtype for shards in bucket.shards for _, shard in shards} == {F32}
    assert bucket.longest == max(sum(shard.last - shard.first for _, shard in shards) for shards in bucket.shards)
    assert [sum_dtype(dtype) for dtype in (torch.float16, BF16, F32, F64)] == [F32, F32, F32, F64]


def test_equal_requests_are_planned_once() -> None:
    assert plan_buckets(settings(LARGE, flexcomm.demo()), 4, 2) is plan_buckets(settings(LARGE, flexcomm.demo()), 4, 2)


def test_ranks_compare_every_setting() -> None:
    fields = settings(LARGE, flexcomm.demo()).fields()
    assert fields["tensor 0"] == "large torch.float32 [512, 512]"
    assert {"tensors", "compressor", "average", "algorithm", "nonfinite", "bucket_bytes", "residuals"} <= set(fields)


def test_settings_nobody_has_are_refused_all_at_once() -> None:
    with pytest.raises(InvalidArgumentError, match=r"average is 'median'.*algorithm is 'ring'.*bucket_bytes is 0"):
        SyncSettings(LARGE, flexcomm.demo(), "median", "ring", "raise", 0, has_residuals=False)  # type: ignore[arg-type]
