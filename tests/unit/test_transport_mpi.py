"""Device pointers reach an MPI only after a child process survived trying."""

from __future__ import annotations

import threading

import pytest
import torch

from flexcomm import device
from flexcomm.transport import mpi
from flexcomm.transport.mpi import environment_without_launcher, mpi_is_gpu_aware, progress_queue


def test_without_a_device_no_mpi_is_gpu_aware() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has a GPU")
    assert mpi_is_gpu_aware() is False


def test_the_child_does_not_take_this_rank_for_its_own() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_RANK": "1", "HYDI_CONTROL_FD": "7", "HOME": "/h"}
    choices = {"OMPI_MCA_btl": "tcp,self", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    assert environment_without_launcher(environ | choices) == {"HOME": "/h"} | choices


class FakeRequest:
    """Done when it was tested once; it remembers where its thread was then."""

    def __init__(self, entered: list[torch.device], *devices: torch.device) -> None:
        self.devices = devices
        self.tested = threading.Event()
        self.found: list[torch.device] = []
        self._entered = entered

    def done(self) -> bool:
        self.found = self._entered[-1:]
        self.tested.set()
        return True


def test_the_progress_thread_enters_the_device_whose_memory_it_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it has no context, in which MPI would copy."""
    entered: list[torch.device] = []
    monkeypatch.setattr(mpi, "enter_device", entered.append)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(mpi, "progress_queue", progress_queue.__wrapped__)
    queue = mpi.progress_queue()
    for devices in ((first,), (first,), (), (second,), (first,)):
        request = FakeRequest(entered, *devices)
        queue.put(request)  # type: ignore[arg-type]
        assert request.tested.wait(10)
        assert request.found == list(devices or [first])
    queue.put(None)
    assert entered == [first, second, first], "and only where it is not there yet"


def test_a_device_is_entered_by_asking_something_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make the first device current does nothing in a new thread, where it is current already."""
    calls: list[object] = []

    class Stream:
        def __init__(self, where: torch.device) -> None:
            self.where = where

        def query(self) -> None:
            calls.append(("query", self.where))

    monkeypatch.setattr("torch.accelerator.set_device_index", calls.append)
    monkeypatch.setattr("torch.accelerator.current_stream", Stream)
    device.enter_device(torch.device("cpu"))
    assert not calls
    device.enter_device(torch.device("cuda", 1))
    assert calls == [1, ("query", torch.device("cuda", 1))]
