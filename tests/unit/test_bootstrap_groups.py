"""Which ranks share a device follows from what all of them said, group by group."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from flexcomm.bootstrap.groups import GroupFactory, check_devices_are_apart, ranks_on_shared_devices
from flexcomm.errors import TransportUnavailableError
from flexcomm.topology import RankInfo
from flexcomm.transport import LoopbackTransport

if TYPE_CHECKING:
    from flexcomm.bootstrap.groups import TransportName

NODES, BETWEEN = [(0, 1), (2, 3)], [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("devices", "inside", "between"),
    [
        ("abcd", [], []),
        ("aabb", [0, 1, 2, 3], []),  # one device on each host
        ("abab", [], [0, 1, 2, 3]),  # one host of two devices, split into two nodes
        ("abcc", [2, 3], []),  # one host has a device less
        ("aaaa", [0, 1, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_ranks_share_a_device_only_with_others_of_their_group(
    devices: str, inside: list[int], between: list[int]
) -> None:
    assert ranks_on_shared_devices(NODES, devices) == inside
    assert ranks_on_shared_devices(BETWEEN, devices) == between


def test_nccl_by_its_name_is_refused_where_ranks_share_a_device() -> None:
    with pytest.raises(TransportUnavailableError, match=r"intra .* nccl, because ranks 2-3 share .*CUDA_VISIBLE"):
        check_devices_are_apart("intra", "nccl", NODES, "abcc")
    check_devices_are_apart("inter", "nccl", BETWEEN, "abcc")


@pytest.mark.parametrize(("kind", "chosen"), [("auto", "gloo"), ("gloo", "gloo"), ("mpi", "mpi")])
def test_the_host_joins_what_nccl_cannot(kind: TransportName, chosen: str) -> None:
    factory = GroupFactory(RankInfo("torch", 1, 4), None, 1.0)
    assert factory.avoid_shared_devices("intra", kind, NODES, "aabb") == chosen
    assert factory.avoid_shared_devices("intra", kind, NODES, "abcd") == kind


def test_a_transport_that_was_passed_is_nobody_elses_business() -> None:
    factory, own = GroupFactory(RankInfo("torch", 1, 4), None, 1.0), LoopbackTransport()
    assert factory.avoid_shared_devices("intra", own, NODES, "aaaa") is own


@pytest.mark.parametrize(("backend", "given_s"), [("gloo", 30.0), ("nccl", 60.0)])
def test_a_wait_raises_before_nccl_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, backend: str, given_s: float
) -> None:
    given: list[float] = []
    monkeypatch.setattr("torch.distributed.new_group", lambda _, timeout, *__, **___: given.append(timeout))
    GroupFactory(RankInfo("torch", 0, 2), None, 30.0)._new_group([0, 1], backend)
    assert given == [timedelta(seconds=given_s)]


def test_settings_do_not_travel_over_nccl() -> None:
    factory, data = GroupFactory(RankInfo("torch"), None, 1.0), LoopbackTransport()
    assert factory.make_control("nccl", data, [(0,)]) is not data
    for kind in ("auto", "gloo", "mpi"):
        assert factory.make_control(kind, data, [(0,)]) is data  # type: ignore[arg-type]
