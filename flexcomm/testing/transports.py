"""The laws of transports. Inputs are small whole numbers, so that sums are exact, and compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from flexcomm.errors import InvalidTensorError
from flexcomm.testing.cases import require, require_equal, with_gaps
from flexcomm.transport import Transport
from flexcomm.transport.staging import REDUCIBLE

MOVABLE = (*REDUCIBLE, torch.int16, torch.uint16, torch.bool, torch.complex64)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 4))


def check_transport(transport: Transport, device: str = "cpu") -> None:
    """Raise ``AssertionError`` unless ``transport`` keeps every law of :class:`flexcomm.Transport`.

    All ranks of the transport call it together.

    Args:
        transport: any object with the methods of :class:`flexcomm.Transport`.
        device: where the tensors lie that it must carry.

    Raises:
        AssertionError: naming the broken law and the rank. The other ranks may wait until their deadline.

    Example:
        >>> from flexcomm.testing import check_transport
        >>> from flexcomm.transport import LoopbackTransport
        >>> check_transport(LoopbackTransport())

    """
    for law in TRANSPORT_LAWS:
        law(transport, device)


def gather_holds_every_ranks_tensor(transport: Transport, device: str) -> None:
    """In a tensor of its own, or in the output that it was given."""
    for x, make in inputs(transport, device, MOVABLE):
        before, expected = x.clone(), torch.stack([make(rank) for rank in range(transport.size)])
        for out in (None, torch.empty_like(expected), with_gaps(torch.zeros_like(expected))):
            gathered = transport.all_gather(x, out).wait()
            require(transport, out is None or gathered is out, "all_gather returns the output it was given")
            require_equal(transport, gathered, expected, f"all_gather of {describe(x)} into {describe(gathered)}")
            require_equal(transport, x, before, "all_gather leaves its input alone")


def gatherv_holds_parts_of_unequal_length(transport: Transport, device: str) -> None:
    counts = [(rank * 3) % 4 + 5 * (rank == 1) for rank in range(transport.size)]
    parts = [torch.arange(count, device=device) + 10 * rank for rank, count in enumerate(counts)]
    for dtype in MOVABLE:
        x = with_gaps(parts[transport.rank].to(dtype))
        gathered = transport.all_gatherv(x, counts).wait()
        require(transport, len(gathered) == transport.size, "all_gatherv returns one tensor a rank")
        for rank, part in enumerate(parts):
            require_equal(transport, gathered[rank], part.to(dtype), f"all_gatherv, {dtype}, part of rank {rank}")


def reduce_holds_the_exact_sum(transport: Transport, device: str) -> None:
    for x, make in inputs(transport, device, REDUCIBLE):
        expected = exact_sum([make(rank) for rank in range(transport.size)])
        reduced = transport.all_reduce(x).wait()
        require(transport, reduced is x, "all_reduce works in place")
        require_equal(transport, x, expected, f"all_reduce of {describe(x)}")


def reduce_gives_the_same_bits_on_every_rank(transport: Transport, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(transport.rank)
        x = torch.randn(10_007, generator=generator).to(device, dtype)
        for other in transport.all_gather(transport.all_reduce(x).wait()).wait():
            require_equal(transport, other, x, f"all_reduce of {dtype} on every rank")


def reduce_scatter_holds_the_exact_sum_of_its_part(transport: Transport, device: str) -> None:
    for dtype in REDUCIBLE:
        for shape in SHAPES:
            rows = [
                torch.stack([numbers(rank + part, shape, dtype, device) for part in range(transport.size)])
                for rank in range(transport.size)
            ]
            x, expected = rows[transport.rank], exact_sum(rows)[transport.rank]
            for source in (x, with_gaps(x)):
                scattered = transport.reduce_scatter(source).wait()
                require_equal(transport, scattered, expected, f"reduce_scatter of {describe(source)}")


def broadcast_holds_the_roots_tensor(transport: Transport, device: str) -> None:
    for root in range(transport.size):
        for x, make in inputs(transport, device, MOVABLE):
            returned = transport.broadcast(x, root).wait()
            require(transport, returned is x, "broadcast works in place")
            require_equal(transport, x, make(root), f"broadcast of {describe(x)} from rank {root}")


def send_recv_carries_messages_in_order(transport: Transport, device: str) -> None:
    """Two messages to the right, one to oneself, an empty one to the left; sizes differ from rank to rank."""
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size

    def message(rank: int, number: int) -> Tensor:
        return numbers(10 * rank + number, (rank + 1, 3), torch.bfloat16, device)

    def blank(rank: int) -> Tensor:
        return with_gaps(torch.zeros_like(message(rank, 0)))

    empty = torch.empty(0, device=device)
    sends = [(right, message(transport.rank, 0)), (right, message(transport.rank, 1)), (left, empty)]
    receives = [(left, blank(left)), (left, blank(left)), (right, torch.empty(0, device=device))]
    if transport.size > 1:
        sends.append((transport.rank, message(transport.rank, 2)))
        receives.append((transport.rank, blank(transport.rank)))
    received = transport.send_recv(sends, receives).wait()
    for got, (peer, place), number in zip(received, receives, (0, 1, None, 2), strict=False):
        require(transport, got is place, "send_recv fills the tensors it was given")
        if number is not None:
            require_equal(transport, got, message(peer, number), f"message {number} from rank {peer}")


def send_recv_may_be_one_sided_or_empty(transport: Transport, device: str) -> None:
    last = transport.size - 1
    x = torch.full((5,), 7, dtype=torch.int16, device=device)
    sends = [(last, x)] if transport.rank == 0 else []
    receives = [(0, torch.zeros_like(x))] if transport.rank == last else []
    for got in transport.send_recv(sends, receives).wait():
        require_equal(transport, got, x, "a one-sided message")


def an_input_may_be_part_of_its_output(transport: Transport, device: str) -> None:
    rows = [numbers(rank, (6,), torch.float32, device) for rank in range(transport.size)]
    out = torch.zeros(transport.size, 6, device=device)
    out[transport.rank] = rows[transport.rank]
    transport.all_gather(out[transport.rank], out).wait()
    require_equal(transport, out, torch.stack(rows), "all_gather of a part of its own output")
    parts = torch.stack(rows)
    expected = parts[transport.rank] * transport.size
    transport.reduce_scatter(parts, parts[transport.rank]).wait()
    require_equal(transport, parts[transport.rank], expected, "reduce_scatter into a part of its own input")


def a_view_travels_as_the_numbers_it_shows(transport: Transport, device: str) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j], device=device) * (transport.rank + 1)
    gathered = transport.all_gather(x.conj()).wait()
    for rank, row in enumerate(gathered):
        expected = torch.tensor([1 - 2j, 3 + 4j], device=device) * (rank + 1)
        require_equal(transport, row, expected, "all_gather of a conjugate view")


def several_are_under_way_at_once(transport: Transport, device: str) -> None:
    """Started in one order, waited for in the other; inputs are dropped, so only the handles keep them alive.

    Backends use other algorithms for large gathers, some of odd length, than for small ones.
    """
    lengths = (*range(1000, 1008), 70_001, 300_007, 131_072)

    def make(rank: int, length: int) -> Tensor:
        return numbers(rank + length, (length,), torch.uint8 if length > 2000 else torch.float32, device)

    gathers = [transport.all_gather(make(transport.rank, length)) for length in lengths]
    sums = [transport.all_reduce(make(transport.rank, length)) for length in range(100, 108)]
    for length, total in reversed(list(enumerate(sums, start=100))):
        expected = exact_sum([make(rank, length) for rank in range(transport.size)])
        require_equal(transport, total.wait(), expected, f"all_reduce of {length} elements under way")
    for length, gather in reversed(list(zip(lengths, gathers, strict=True))):
        expected = torch.stack([make(rank, length) for rank in range(transport.size)])
        require_equal(transport, gather.wait(), expected, f"all_gather of {length} elements under way")


def a_handle_can_be_waited_for_again(transport: Transport, device: str) -> None:
    handle = transport.all_gather(torch.ones(3, device=device))
    first = handle.wait()
    require(transport, handle.done(), "a handle that was waited for is done")
    require(transport, handle.wait() is first, "waiting again returns the same result")


def a_barrier_is_passed_by_all_or_none(transport: Transport, device: str) -> None:
    for _ in range(3):
        transport.barrier().wait()
    arrived = transport.all_gather(torch.ones((), device=device)).wait()
    require(transport, bool(arrived.all()), "every rank came through the barriers")


def what_cannot_be_carried_is_refused_before_anything_starts(transport: Transport, device: str) -> None:
    x = torch.ones(4, device=device)
    refused: tuple[Callable[[], object], ...] = (
        lambda: transport.all_gather(x, torch.empty(transport.size + 1, 4, device=device)),
        lambda: transport.all_gather(x, torch.empty(transport.size, 4, device=device, dtype=torch.float64)),
        lambda: transport.all_gatherv(x, [5] * transport.size),
        lambda: transport.all_gatherv(x, [4] * (transport.size + 1)),
        lambda: transport.all_reduce(x.to(torch.int16)),
        lambda: transport.reduce_scatter(torch.ones(transport.size + 1, 2, device=device)),
        lambda: transport.broadcast(x, transport.size),
        lambda: transport.send_recv([(transport.size, x)], []),
        lambda: transport.all_reduce(x.to_sparse()),
        lambda: transport.all_reduce(torch.ones(1, device=device).expand(4)),
        lambda: transport.broadcast(torch.ones(2, device=device, dtype=torch.complex64).conj()),
        lambda: transport.send_recv([], [(0, torch.empty(4, device="meta"))]),
    )
    for number, attempt in enumerate(refused):
        try:
            attempt()
        except InvalidTensorError:
            continue
        require(transport, False, f"misuse number {number} raises InvalidTensorError")
    transport.barrier().wait()


TRANSPORT_LAWS: tuple[Callable[[Transport, str], None], ...] = (
    gather_holds_every_ranks_tensor,
    gatherv_holds_parts_of_unequal_length,
    reduce_holds_the_exact_sum,
    reduce_gives_the_same_bits_on_every_rank,
    reduce_scatter_holds_the_exact_sum_of_its_part,
    broadcast_holds_the_roots_tensor,
    send_recv_carries_messages_in_order,
    send_recv_may_be_one_sided_or_empty,
    an_input_may_be_part_of_its_output,
    a_view_travels_as_the_numbers_it_shows,
    several_are_under_way_at_once,
    a_handle_can_be_waited_for_again,
    a_barrier_is_passed_by_all_or_none,
    what_cannot_be_carried_is_refused_before_anything_starts,
)


def inputs(
    transport: Transport, device: str, dtypes: Iterable[torch.dtype]
) -> Iterator[tuple[Tensor, Callable[[int], Tensor]]]:
    """Yield a tensor of this rank for each dtype and shape, contiguous and not, and what makes any rank's."""
    for dtype in dtypes:
        for shape in SHAPES:

            def make(rank: int, shape: tuple[int, ...] = shape, dtype: torch.dtype = dtype) -> Tensor:
                return numbers(rank, shape, dtype, device)

            yield make(transport.rank), make
            yield with_gaps(make(transport.rank)), make


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return whole numbers from 0 to 7 that differ between ranks: even bfloat16 and int8 add 16 of them exactly."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count, device=device) * 3 + rank * 5 + 1) % 8).reshape(shape).to(dtype)


def exact_sum(tensors: list[Tensor]) -> Tensor:
    total = torch.stack([x.to(torch.float64) for x in tensors]).sum(dim=0)
    return total.to(tensors[0].dtype)


def describe(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}{'' if x.is_contiguous() else ' with gaps'}"
