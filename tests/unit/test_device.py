"""The table of devices: the host is always in it, and no answer names a device that is not there."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import flexcomm
from flexcomm import device
from flexcomm.bootstrap.groups import TransportName
from flexcomm.kernels import choose_kernels
from flexcomm.transport import MPITransport

HOST = torch.device("cpu")


def test_the_host_has_a_row_and_needs_no_streams() -> None:
    assert device.KINDS["cpu"] is device.HOST
    assert "meta" not in device.KINDS
    assert device.make_stream(HOST) is device.record_event(HOST) is None
    device.synchronize_stream(HOST, timeout_s=0.0)
    device.synchronize_event(None, timeout_s=0.0)
    device.order_current_stream(HOST, None)
    device.order_stream(None)
    assert device.switch_stream(None) is None
    copy, copied = device.copy_to_host(torch.arange(3))
    assert (copy.tolist(), copied) == ([0, 1, 2], None)


@pytest.mark.parametrize(("numel", "is_large"), [(1 << 20, False), (1 << 24, True)])
def test_large_outputs_are_in_huge_pages(numel: int, is_large: bool) -> None:
    x = torch.empty(numel // 4, 4).t()
    out = device.empty_like(x)
    assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, x.dtype, True)
    advised, inside = False, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= out.data_ptr() + out.nbytes // 2 < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            advised = "hg" in line.split()
    assert advised == is_large


def test_without_an_accelerator_every_rank_works_on_the_host() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert (device.accelerator(), device.native_backend(), device.backends_of_default_group()) == (None, None, "gloo")
    assert device.own_device(3) == device.current_device("cpu") == HOST


def test_a_kind_of_device_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new row alone changes: its tensors are taken, travel over its backend, and find their kernels."""
    row = device.DeviceKind("xpu", kernels="staged", backend="xccl", has_streams=True, has_pinned_memory=True)
    monkeypatch.setitem(device.KINDS, "xpu", row)
    refused = pytest.raises(flexcomm.InvalidTensorError, match="dense tensors on cpu or cuda or xpu")
    with flexcomm.connect() as world, refused:
        flexcomm.hierarchical_sync(torch.zeros(3, device="meta"), flexcomm.dense(), world=world)
    assert (device.backend_for("xpu"), device.find_native("xccl")) == ("xccl", row)
    assert choose_kernels(torch.device("xpu")).name == "staged"


def test_a_device_is_told_from_others_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that see one device each call all of them number 0."""
    uuids = ["a", "b"]
    row = device.DeviceKind("xpu", "staged", "xccl", True, True, uuid=lambda one: uuids[one.index])
    monkeypatch.setitem(device.KINDS, "xpu", row)
    first, second = device.identify(torch.device("xpu", 0)), device.identify(torch.device("xpu", 1))
    assert (first.split(" on ")[0], second.split(" on ")[0]) == ("xpu a", "xpu b")
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert device.identify(torch.device("xpu", 0)) == "xpu a on elsewhere" != first


class FakeEvent:
    """An event that the device comes to after so many questions; None: never."""

    def __init__(self, questions: int | None) -> None:
        self.asked, self._questions = 0, questions

    def query(self) -> bool:
        self.asked += 1
        return self._questions is not None and self.asked > self._questions


@pytest.mark.parametrize("questions", [0, 1, 5, 2000])
def test_an_event_is_waited_for_until_the_device_has_come_to_it(questions: int) -> None:
    event: Any = FakeEvent(questions)
    device.synchronize_event(event, timeout_s=60.0)
    assert event.asked == questions + 1


def test_a_device_that_does_not_finish_is_waited_for_no_longer_than_the_deadline() -> None:
    event: Any = FakeEvent(None)
    start_s = time.monotonic()
    with pytest.raises(flexcomm.DeadlineExceededError, match=r"the device did not finish: waited 0\.05 s"):
        device.synchronize_event(event, timeout_s=0.05)
    assert event.asked > 1
    assert time.monotonic() - start_s >= 0.05


def test_a_stream_is_waited_for_by_an_event_with_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before a copy to the host, behind a collective whose peer is gone."""
    monkeypatch.setattr(device, "record_event", lambda _: FakeEvent(None))
    monkeypatch.setattr("flexcomm.transport.mpi.is_on_host", lambda _: False)
    monkeypatch.setattr("flexcomm.transport.mpi.mpi_is_gpu_aware", lambda: False)
    transport = MPITransport(FakeComm(), timeout_s=0.05)  # type: ignore[arg-type]
    with pytest.raises(flexcomm.DeadlineExceededError, match="the device did not finish"):
        transport.all_reduce(torch.ones(3))


class FakeComm:
    def Get_rank(self) -> int:  # noqa: N802  (MPI's name)
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 2


def test_the_transports_people_can_name_are_those_of_the_table() -> None:
    backends = {kind.backend for kind in device.KINDS.values()} - {None}
    assert set(get_args(TransportName)) == {"auto", "mpi"} | backends
