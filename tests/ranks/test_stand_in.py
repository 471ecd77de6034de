"""The stand-in reports what would go wrong on a device, and nothing else: programs wrong by a line, and right ones.

Each runs on ranks of its own, which return what was reported.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks.processes import run_ranks
from tests.stand_in import collectives, device
from tests.stand_in.build import build_device, build_kernels
from tests.stand_in.collective_order import find_disorder
from tests.stand_in.collectives import Enqueued
from tests.stand_in.laws import Prepare

if TYPE_CHECKING:
    from collections.abc import Callable

RACE = "a stream uses what another still writes"
OVERWRITTEN = "a stream writes what another still reads"
USED_ANEW = "memory was freed, and is used anew while a stream still uses it"
FREED = "memory is used that was freed"
HOST_TOUCHES = "the host touches pinned memory that a stream still writes"
HOST_WRITES = "the host writes pinned memory that a stream still reads"
NUMEL = 1000


def on_device(fill: float = 1.0) -> torch.Tensor:
    """Return a tensor that the host knows to be written."""
    x = torch.full((NUMEL,), fill, device=device.NAME)
    torch.get_device_module().synchronize()
    return x


def side_stream() -> torch.Stream:
    return torch.Stream(device.NAME)


# --- streams ----------------------------------------------------------------------------------------------------------


def reads_without_waiting(native: Any) -> None:
    del native
    x = on_device() + 1
    with device.use_stream(side_stream()):
        x.sum()


def reads_behind_an_event(native: Any) -> None:
    del native
    x = on_device() + 1
    event, side = torch.accelerator.current_stream().record_event(), side_stream()
    with device.use_stream(side):
        side.wait_event(event)
        x.sum()


def reads_behind_an_event_that_was_recorded_too_early(native: Any) -> None:
    del native
    x = on_device()
    event, side = torch.accelerator.current_stream().record_event(), side_stream()
    x += 1
    with device.use_stream(side):
        side.wait_event(event)
        x.sum()


def reads_behind_a_stream(native: Any) -> None:
    del native
    x, side = on_device() + 1, side_stream()
    side.wait_stream(torch.accelerator.current_stream())
    with device.use_stream(side):
        x.sum()


def reads_after_the_host_waited(native: Any) -> None:
    del native
    x = on_device() + 1
    x.sum().item()
    with device.use_stream(side_stream()):
        x.sum()


def reads_after_a_query(native: Any) -> None:
    del native
    x = on_device() + 1
    event = torch.accelerator.current_stream().record_event()
    assert not event.query(), "it may take its time"
    assert event.query()
    with device.use_stream(side_stream()):
        x.sum()


def reads_after_a_query_that_said_no(native: Any) -> None:
    del native
    x = on_device() + 1
    torch.accelerator.current_stream().record_event().query()
    with device.use_stream(side_stream()):
        x.sum()


def reads_through_a_third_stream(native: Any) -> None:
    del native
    first, second, third = side_stream(), side_stream(), side_stream()
    x = on_device()
    with device.use_stream(first):
        x += 1
    second.wait_stream(first)
    third.wait_stream(second)
    with device.use_stream(third):
        x.sum()


def writes_what_is_read(native: Any) -> None:
    del native
    x = on_device()
    with device.use_stream(side_stream()):
        x.sum()
    x += 1


def writes_another_part_of_what_is_read(native: Any) -> None:
    del native
    x = on_device()
    with device.use_stream(side_stream()):
        x[: NUMEL // 2].sum()
    x[NUMEL // 2 :].add_(1)


def two_streams_read(native: Any) -> None:
    del native
    x = on_device()
    with device.use_stream(side_stream()):
        x.sum()
    x.sum()


def backward_on_another_stream(native: Any) -> None:
    """Autograd runs the backward of an operator on its forward's stream, and orders the caller behind it."""
    del native
    x = on_device().requires_grad_()
    side = side_stream()
    side.wait_stream(torch.accelerator.current_stream())
    with device.use_stream(side):
        y = x * x
    torch.accelerator.current_stream().wait_stream(side)
    y.sum().backward()
    assert x.grad is not None
    x.grad.sum()


def act_in_comm_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act, name="flexcomm-wait")
    thread.start()
    thread.join()


def another_thread_waited(native: Any) -> None:
    """It knows what it waited for, and tells nobody."""
    del native
    x = on_device() + 1
    act_in_comm_thread(torch.accelerator.current_stream().synchronize)
    with device.use_stream(side_stream()):
        x.sum()


def another_thread_waited_and_said_so(native: Any) -> None:
    del native
    x, done = on_device() + 1, threading.Event()
    stream = torch.accelerator.current_stream()

    def wait() -> None:
        stream.synchronize()
        done.set()

    act_in_comm_thread(wait)
    done.wait()
    with device.use_stream(side_stream()):
        x.sum()


def another_thread_freed_what_it_waited_for(native: Any) -> None:
    """Who gets the memory next comes after the thread that freed it."""
    del native
    held, side = [on_device()], side_stream()
    with device.use_stream(side):
        held[0].sum()

    def free() -> None:
        side.synchronize()
        held.clear()

    act_in_comm_thread(free)
    torch.zeros(NUMEL, device=device.NAME)


def a_kernel_without_waiting(native: Any) -> None:
    x = on_device() + 1
    with device.use_stream(side_stream()):
        native.access("kernel", 0, x.data_ptr(), x.nbytes, writes=False)


# --- memory -----------------------------------------------------------------------------------------------------------


def frees_what_another_stream_reads(native: Any) -> None:
    del native
    x = on_device()
    with device.use_stream(side_stream()):
        x.sum()
    del x
    torch.zeros(NUMEL, device=device.NAME)


def frees_what_was_recorded(native: Any) -> None:
    del native
    x, side = on_device(), side_stream()
    with device.use_stream(side):
        x.sum()
    x.record_stream(side)
    del x
    torch.zeros(NUMEL, device=device.NAME)


def frees_behind_the_other_stream(native: Any) -> None:
    del native
    x, side = on_device(), side_stream()
    with device.use_stream(side):
        x.sum()
    torch.accelerator.current_stream().wait_stream(side)
    del x
    torch.zeros(NUMEL, device=device.NAME)


def a_kernel_that_kept_an_address(native: Any) -> None:
    x = on_device()
    address, nbytes = x.data_ptr(), x.nbytes
    del x
    native.access("kernel", 0, address, nbytes, writes=False)


def freed_memory_holds_nan(native: Any) -> None:
    x = on_device()
    view = native.host_view(x)
    assert view.sum() == NUMEL
    del x
    assert view.isnan().all()
    y = torch.empty(NUMEL, device=device.NAME)
    assert native.host_view(y).data_ptr() == view.data_ptr(), "a freed block is handed out again at once"
    with device.use_stream(side_stream()):
        z = torch.empty(NUMEL, device=device.NAME)
    assert native.host_view(z).data_ptr() != view.data_ptr(), "on its own stream"


# --- the host ---------------------------------------------------------------------------------------------------------


def reads_a_copy_that_is_queued(native: Any) -> None:
    del native
    pinned = torch.empty(NUMEL, pin_memory=True)
    pinned.copy_(on_device(), non_blocking=True)
    pinned.sum()


def reads_a_copy_it_waited_for(native: Any) -> None:
    del native
    pinned = torch.empty(NUMEL, pin_memory=True)
    pinned.copy_(on_device(), non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    assert pinned.sum() == NUMEL


def numpy_reads_a_copy_that_is_queued(native: Any) -> None:
    del native
    pinned = torch.empty(NUMEL, pin_memory=True)
    octets = pinned.numpy()
    pinned.copy_(on_device(), non_blocking=True)
    octets.sum()


def writes_what_a_queued_copy_reads(native: Any) -> None:
    del native
    pinned, x = torch.ones(NUMEL).pin_memory(), on_device()
    x.copy_(pinned, non_blocking=True)
    pinned.zero_()


def reads_what_a_queued_copy_reads(native: Any) -> None:
    del native
    pinned, x = torch.ones(NUMEL).pin_memory(), on_device()
    x.copy_(pinned, non_blocking=True)
    assert pinned.sum() == NUMEL


def writes_what_a_blocking_copy_read(native: Any) -> None:
    del native
    pinned, x = torch.ones(NUMEL).pin_memory(), on_device()
    x.copy_(pinned)
    pinned.zero_()


def drops_what_a_queued_copy_reads(native: Any) -> None:
    """CUDA's allocator of pinned memory keeps it until the copy is done."""
    del native
    x = on_device()
    x.copy_(torch.ones(NUMEL).pin_memory(), non_blocking=True)
    torch.ones(NUMEL).pin_memory()


PROGRAMS: list[tuple[Callable[[Any], None], str]] = [
    (reads_without_waiting, RACE),
    (reads_behind_an_event, ""),
    (reads_behind_an_event_that_was_recorded_too_early, RACE),
    (reads_behind_a_stream, ""),
    (reads_after_the_host_waited, ""),
    (reads_after_a_query, ""),
    (reads_after_a_query_that_said_no, RACE),
    (reads_through_a_third_stream, ""),
    (writes_what_is_read, OVERWRITTEN),
    (writes_another_part_of_what_is_read, ""),
    (two_streams_read, ""),
    (backward_on_another_stream, ""),
    (another_thread_waited, RACE),
    (another_thread_waited_and_said_so, ""),
    (another_thread_freed_what_it_waited_for, ""),
    (a_kernel_without_waiting, RACE),
    (frees_what_another_stream_reads, USED_ANEW),
    (frees_what_was_recorded, ""),
    (frees_behind_the_other_stream, ""),
    (a_kernel_that_kept_an_address, FREED),
    (freed_memory_holds_nan, ""),
    (reads_a_copy_that_is_queued, HOST_TOUCHES),
    (reads_a_copy_it_waited_for, ""),
    (numpy_reads_a_copy_that_is_queued, HOST_TOUCHES),
    (writes_what_a_queued_copy_reads, HOST_WRITES),
    (reads_what_a_queued_copy_reads, ""),
    (writes_what_a_blocking_copy_read, ""),
    (drops_what_a_queued_copy_reads, ""),
]


def run_programs(prepare: Prepare) -> list[list[str]]:
    native = prepare()
    reports = []
    for program, _ in PROGRAMS:
        program(native)
        native.synchronize()
        reports.append(native.take_reports())
    return reports


@pytest.fixture(scope="module")
def prepare() -> Prepare:
    return Prepare(build_device(), build_kernels())


def test_what_is_wrong_is_reported_and_nothing_else(prepare: Prepare) -> None:
    (reports,) = run_ranks(run_programs, 1, prepare)
    for (program, expected), found in zip(PROGRAMS, reports, strict=True):
        kinds = {text.splitlines()[0] for text in found}
        assert kinds == ({expected} if expected else set()), (program.__name__, found)
        for text in found:
            assert f"in {program.__name__}" in text, "both accesses are shown where they were made"


# --- collectives ------------------------------------------------------------------------------------------------------


def start(prepare: Prepare) -> tuple[Any, torch.device, int]:
    """Return the extension, this rank's device and rank, in a job with a backend for hosts and one for devices."""
    native = prepare()
    dist.init_process_group(f"cpu:gloo,{device.NAME}:{device.BACKEND}")
    rank = dist.get_rank()
    own = torch.device(device.NAME, rank % native.device_count())
    torch.accelerator.set_device_index(own)
    return native, own, rank


def uses_collectives_rightly(prepare: Prepare) -> tuple[list[str], list[list[Any]]]:
    native, own, rank = start(prepare)
    x = torch.full((NUMEL,), rank + 1.0, device=own)
    work = dist.all_reduce(x, async_op=True)
    before = native.host_waits()
    work.wait()
    assert native.host_waits() == before, "to wait for work does not block the host"
    assert (x == 3.0).all()
    gathered, host = torch.empty(2 * NUMEL, device=own), torch.full((1,), rank + 1.0)
    dist.all_gather_single(gathered, x * (rank + 1))
    assert gathered.view(2, -1)[:, 0].tolist() == [3.0, 6.0]
    mean = torch.full((4,), float(rank), device=own, dtype=torch.bfloat16)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.tolist() == [0.5] * 4
    dist.all_reduce(host)
    assert host.item() == 3.0, "host tensors go over gloo"
    peer, received = 1 - rank, torch.empty(3, device=own)
    sent = torch.full((3,), float(rank), device=own)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, sent, peer)]):
        work.wait()
    assert received.tolist() == [float(peer)] * 3
    dist.barrier()
    return native.take_reports(), [[*one] for one in collectives.LOG]


def does_not_wait_for_work(prepare: Prepare) -> list[str]:
    native, own, _ = start(prepare)
    x = torch.ones(NUMEL, device=own)
    work = dist.all_reduce(x, async_op=True)
    x.sum()
    work.wait()
    return native.take_reports()


def drops_what_is_sent(prepare: Prepare) -> list[str]:
    """Work holds its tensors until it is waited for."""
    native, own, _ = start(prepare)
    x, out = torch.ones(NUMEL, device=own), torch.empty(2 * NUMEL, device=own)
    work = dist.all_gather_single(out, x, async_op=True)
    del x
    torch.zeros(NUMEL, device=own)
    work.wait()
    torch.zeros(NUMEL, device=own)
    return native.take_reports()


def raised_by(prepare: Prepare, act: Callable[[torch.device, int], None]) -> str:
    _, own, rank = start(prepare)
    try:
        act(own, rank)
    except RuntimeError as error:
        return str(error)
    return ""


def sends_a_host_tensor(own: torch.device, rank: int) -> None:
    del own, rank
    dist.all_reduce(torch.ones(3), group=dist.new_group(backend=device.BACKEND))


def reduces(own: torch.device, rank: int) -> None:
    del rank
    dist.all_reduce(torch.ones(3, device=own))


def sends_first(own: torch.device, rank: int) -> None:
    if rank > 1:
        return
    x = torch.ones(3, device=own)
    op = dist.isend if rank == 0 else dist.irecv
    for work in dist.batch_isend_irecv([dist.P2POp(op, x, 1 - rank)]):
        work.wait()


def sends_later(own: torch.device, rank: int) -> None:
    reduces(own, rank)
    sends_first(own, rank)


def sends_too_much(own: torch.device, rank: int) -> None:
    reduces(own, rank)
    x = torch.ones(3 + rank, device=own)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if rank else dist.irecv, x, 1 - rank)]):
        work.wait()


def reduces_another_length(own: torch.device, rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank, device=own))


def test_right_collectives_are_carried_out(prepare: Prepare) -> None:
    outcomes = run_ranks(uses_collectives_rightly, 2, prepare, ranks_per_node=2)
    assert [reports for reports, _ in outcomes] == [[], []]
    logs = [[Enqueued.read(*one) for one in log] for _, log in outcomes]
    assert len(logs[0]) == 4
    assert not find_disorder(logs)


@pytest.mark.parametrize(("program", "expected"), [(does_not_wait_for_work, RACE), (drops_what_is_sent, "")])
def test_work_must_be_waited_for(prepare: Prepare, program: Callable[..., Any], expected: str) -> None:
    for found in run_ranks(program, 2, prepare, ranks_per_node=2):
        assert {text.splitlines()[0] for text in found} == ({expected} if expected else set())


@pytest.mark.parametrize(
    ("act", "ranks", "devices", "said"),
    [
        (sends_a_host_tensor, 2, 2, "No backend type associated with device type cpu"),
        (reduces, 2, 1, "Duplicate GPU detected"),
        pytest.param(sends_first, 3, 3, r"rank 2 of \(0, 1, 2\) did not come", marks=pytest.mark.slow),  # waits 15 s
        (sends_later, 3, 3, ""),
        (sends_too_much, 2, 2, "a recv of 12 bytes meets 16 bytes on rank 1"),
        (reduces_another_length, 2, 2, "ranks enqueued different collectives"),
    ],
    ids=["host tensor", "shared device", "communicator of some", "communicator of all", "message", "length"],
)
def test_misused_collectives_raise(
    prepare: Prepare, act: Callable[[torch.device, int], None], ranks: int, devices: int, said: str
) -> None:
    own = Prepare(prepare.device_library, prepare.kernel_library, devices)
    first, *_ = run_ranks(raised_by, ranks, own, act, ranks_per_node=ranks)
    assert re.search(said, first) if said else not first, first


def enqueued(group: str, verb: str = "all_reduce", peer: int = 0, thread: str = "MainThread") -> Enqueued:
    return Enqueued(group, (0, 1), ((verb, peer, 4),), thread)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([enqueued("a"), enqueued("b")], [enqueued("a"), enqueued("b")], None),
        ([enqueued("a"), enqueued("b")], [enqueued("b"), enqueued("a")], "in different orders"),
        ([enqueued("a")], [enqueued("a"), enqueued("a")], "rank 0 enqueued"),
        ([enqueued("a")], [enqueued("a", "broadcast")], "rank 0 enqueued"),
        ([enqueued("a", "send", 1), enqueued("b")], [enqueued("b"), enqueued("a", "recv", 0)], "in different orders"),
        ([enqueued("a", "send", 1), enqueued("b")], [enqueued("a", "recv", 0), enqueued("b")], None),
        ([enqueued("a", thread="flexcomm-mixing")], [enqueued("a")], "flexcomm-mixing"),
    ],
)
def test_orders_that_differ_are_found(first: list[Enqueued], second: list[Enqueued], said: str | None) -> None:
    found = find_disorder([first, second])
    assert [said in text for text in found] == [True] if said else not found
