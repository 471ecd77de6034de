"""The laws of kernel sets: the reference computes every bit, and a set computes the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch

from flexcomm.kernels import (
    NO_SAMPLE_KEY,
    Average,
    IndexCode,
    Momentum,
    Payload,
    PayloadError,
    ReferenceKernels,
    Selection,
    TensorPlan,
    ValueCode,
)
from flexcomm.kernels.base import LARGEST_MAGNITUDE
from flexcomm.testing.cases import DTYPES, Case, layout_with, numbers, sampled_cases, with_gaps
from flexcomm.testing.coefficients import Sent, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flexcomm.kernels import Kernels

__all__ = ["KERNEL_LAWS", "check_kernels"]

_REFERENCE = ReferenceKernels()
_LENGTHS = (0, 1, 37, 2100)
_MIXTURES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0.6, (0.4,)),
    (1.0 / 3.0, (1.0 / 3.0, 1.0 / 3.0)),
    (0.0, (0.3, 0.7)),
    (0.0, (0.3,)),
    (0.9, ()),
    (-1.5, (0.0, 2.0, 0.25, 0.25)),
)
"""What is kept, and the weights of others."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_kernels(kernels: Kernels, device: str = "cpu") -> None:
    """Raise ``AssertionError`` unless ``kernels`` computes what the reference does, to the bit.

    The reference works on the CPU, whatever the device: its bits are the same everywhere, and there it is beyond doubt.
    """
    for law in KERNEL_LAWS:
        law(kernels, device)


def encode_writes_the_references_words(kernels: Kernels, device: str) -> None:
    for case in sampled_cases(60):
        x, momentum = case.x().to(device), case.momentum(device)
        sent, expected = encode_case(kernels, case, x, momentum), encode_case(_REFERENCE, case, case.x())
        require_equal(kernels, sent.words, expected.words, f"encode_ writes the reference's words: {case}")
        require(kernels, sent.is_finite == expected.is_finite, f"encode_ tells whether all is finite: {case}")
        require_equal(kernels, x, case.x(), f"encode_ leaves x alone: {case}")
        if case.memory in ("apart", "last"):
            require_equal(
                kernels, momentum.state, case.momentum("cpu").state, f"encode_ leaves the state alone: {case}"
            )


def encode_keeps_what_the_reference_keeps(kernels: Kernels, device: str) -> None:
    for case in sampled_cases(60, seed=1):
        momentum, expected = case.momentum(device), case.momentum("cpu")
        encode_case(kernels, case, case.x().to(device), momentum)
        encode_case(_REFERENCE, case, case.x(), expected)
        require_equal(kernels, momentum.next_state, expected.next_state, f"what is not sent is kept: {case}")


def zeros_keep_the_sign_the_reference_gives_them(kernels: Kernels, device: str) -> None:
    x = torch.tensor([-0.0, 0.0, 1.0, -1.0, -0.0, 0.25, -0.0, 0.0])
    for values in ValueCode:
        for selection, keep in ((Selection.EVERYTHING, 8), (Selection.LARGEST, 5), (Selection.STRIDED, 3)):
            plan = TensorPlan(1, 8, 1, 8, False, selection, keep, values)
            late, expected = torch.empty(1, 8, device=device), torch.empty(1, 8)
            sent = encode(kernels, x.to(device), plan, momentum=Momentum(None, late))
            reference = encode(_REFERENCE, x, plan, momentum=Momentum(None, expected))
            require_equal(kernels, sent.words, reference.words, f"zeros are sent as the reference sends them: {plan}")
            require_equal(kernels, late, expected, f"zeros are kept as the reference keeps them: {plan}")


def encode_reports_a_broken_state(kernels: Kernels, device: str) -> None:
    for values in ValueCode:
        for broken in (torch.nan, torch.inf, -torch.inf):
            plan = TensorPlan(1, 64, 1, 32, False, Selection.LARGEST, 2, values)
            state = torch.zeros(plan.state_shape, device=device)
            state[1, 7] = broken
            sent = encode(kernels, torch.ones(64, device=device), plan, momentum=Momentum(state, state))
            require(kernels, not sent.is_finite, f"encode_ is False for a state that holds {broken}, {values.name}")


def a_full_threshold_sends_exactly_its_capacity(kernels: Kernels, device: str) -> None:
    """Equal magnitudes leave in the order of chunks and indices: none waits for ever behind the others."""
    plan = TensorPlan(1, 70, 1, 32, False, Selection.ABOVE, 40, ValueCode.FP32, tau=0.5)
    x = torch.ones(70)
    x[50] = 3.0
    rest = torch.empty(plan.state_shape, device=device)
    sent = encode(kernels, x.to(device), plan, momentum=Momentum(None, rest))
    expected = torch.nn.functional.pad(x, (0, 26))
    expected[:39], expected[50] = 0.0, 0.0
    require_equal(kernels, sent.payload.counts, torch.tensor([32, 8, 0]), f"the first chunks fill the capacity: {plan}")
    require_equal(kernels, rest.view(-1), expected, f"the largest and then the first leave: {plan}")


def many_broken_coefficients_are_not_overlooked(kernels: Kernels, device: str) -> None:
    """A threshold that rises must not rise above NaN: nothing would be sent, and nobody would hear of it."""
    plan = TensorPlan(1, 64, 1, 32, False, Selection.ABOVE, 5, ValueCode.BF16, tau=0.5)
    for bits in (0x7FFFFFFF, 0x7FC00000, 0x7F800000):
        state = torch.full(plan.state_shape, bits, dtype=torch.int32).view(torch.float32).to(device)
        sent = encode(kernels, torch.ones(64, device=device), plan, momentum=Momentum(state, state.clone(), decay=1.0))
        require(kernels, not sent.is_finite, f"encode_ is False for a state full of {bits:08x}")
        require(kernels, entries_of(sent) == plan.k, f"no more than the capacity, {bits:08x}")


def find_threshold_counts_what_the_reference_counts(kernels: Kernels, device: str) -> None:
    for case in (case for case in sampled_cases(150, seed=2) if case.plan.is_variable):
        x, momentum = case.x().to(device), case.momentum(device)
        got = kernels.find_threshold(x, case.plan, momentum)
        expected = _REFERENCE.find_threshold(case.x(), case.plan, case.momentum("cpu"))
        require_equal(kernels, got.counts, expected.counts, f"find_threshold counts what reaches the threshold: {case}")
        require(kernels, got.tau_bits == expected.tau_bits, f"find_threshold finds the reference's threshold: {case}")
        require_equal(kernels, x, case.x(), f"find_threshold leaves x alone: {case}")
        require_equal(
            kernels, momentum.state, case.momentum("cpu").state, f"find_threshold leaves states alone: {case}"
        )


def counts_are_read_as_they_were_written(kernels: Kernels, device: str) -> None:
    for case in (case for case in sampled_cases(150, seed=3) if case.plan.is_variable and case.plan.chunks):
        sent = encode_case(_REFERENCE, case, case.x())
        words = torch.cat((torch.full((3,), -1, dtype=torch.int32), sent.words)).to(device)
        require_equal(kernels, kernels.read_counts(words, case.plan, 3), sent.payload.counts, f"read_counts: {case}")
    plan = TensorPlan(1, 400, 1, 40, False, Selection.ABOVE, 400, ValueCode.FP32)
    too_many = torch.tensor([0, 41 << 4, 0], dtype=torch.int32, device=device)
    require(kernels, kernels.read_counts(too_many, plan, 0) is None, "read_counts is None if a count exceeds a chunk")


def errors_are_found_where_the_reference_finds_them(kernels: Kernels, device: str) -> None:
    """One word is damaged at a time, so that there is one error to name."""
    random = np.random.default_rng(4)
    for case in sampled_cases(60, seed=4):
        sent = encode_case(_REFERENCE, case, case.x())
        layout, counts = sent.payload.layout, sent.payload.counts
        payload = sent.payload._replace(counts=None if counts is None else counts.to(device))
        words = sent.words.to(device)
        require(kernels, kernels.find_error(words, payload, case.plan) is PayloadError.NONE, f"{case} is faultless")
        for _ in range(4 if layout.nwords > layout.indices else 0):
            place = int(random.integers(layout.indices, layout.nwords))
            damaged = sent.words.clone()
            damaged[place] = (0, -1, damaged[place] ^ (1 << int(random.integers(31))))[int(random.integers(3))]
            got = kernels.find_error(damaged.to(device), payload, case.plan)
            expected = _REFERENCE.find_error(damaged, sent.payload, case.plan)
            require(kernels, got is expected, f"find_error is {expected!r}, not {got!r}, of word {place}: {case}")


def the_first_kind_of_error_is_named(kernels: Kernels, device: str) -> None:
    """Whatever chunk it is in, and however chunks are shared out."""
    plan = TensorPlan(1, 4096, 1, 64, False, Selection.LARGEST, 4, ValueCode.BF16)
    sent = encode(_REFERENCE, torch.randn(4096, generator=torch.Generator().manual_seed(0)), plan)
    layout, words = sent.payload.layout, sent.words.clone()
    words[layout.values] = 0x7FC07FC0
    got = kernels.find_error(words.to(device), sent.payload, plan)
    require(kernels, got is PayloadError.VALUE, f"NaN in the first chunk is a error of values, not {got!r}")
    words[layout.scales - 1] = 0
    got = kernels.find_error(words.to(device), sent.payload, plan)
    require(kernels, got is PayloadError.INDEX, f"indices that are missing in the last chunk come first, not {got!r}")


def decode_gives_the_references_average(kernels: Kernels, device: str) -> None:
    """Payloads lie at any word; outputs hold NaN before, and may have gaps."""
    for number, case in enumerate(sampled_cases(60, seed=5)):
        if case.plan.variable_length and case.code is None:
            continue
        sent = [encode_case(_REFERENCE, case, case.x(sender), sender=sender) for sender in range(1 + number % 3)]
        require_decoded(kernels, sent, case, device, f"decode_ averages as the reference does: {case}")


def payloads_of_one_average_may_be_laid_out_differently(kernels: Kernels, device: str) -> None:
    """Exact payloads are as long as what they hold, so the shortest index code differs from sender to sender."""
    plan = TensorPlan(1, 500, 1, 100, False, Selection.ABOVE, 500, ValueCode.BF16, tau=1.0, variable_length=True)
    case = Case((500,), plan, None, torch.float32, "normal", "none", False, 6)
    sent = [encode(_REFERENCE, scale * case.x(sender), plan) for sender, scale in enumerate((0.5, 1.0, 4.0))]
    require(kernels, len({one.payload.layout.code for one in sent}) > 1, "layouts differ, or this shows nothing")
    require_decoded(kernels, sent, case, device, f"each payload is read by its own layout: {case}")
    codes = (IndexCode.BITMAP, IndexCode.PACKED, IndexCode.ELIAS_FANO)
    fixed = replace(plan, selection=Selection.LARGEST, k=9, variable_length=False)
    other = replace(case, plan=fixed)
    coded = [encode(_REFERENCE, other.x(i), fixed, layout=layout_with(fixed, 45, code)) for i, code in enumerate(codes)]
    require_decoded(kernels, coded, other, device, f"each payload is read by its own layout: {other}")


def decode_adds_in_the_order_given(kernels: Kernels, device: str) -> None:
    plan = TensorPlan(1, 2, 1, 2, False, Selection.EVERYTHING, 2, ValueCode.FP32)
    large, small = torch.tensor([2.0**60, -(2.0**60)]), torch.tensor([1.0, 1.0])
    for order, expected in (((large, -large, small), 1.0 / 3.0), ((large, small, -large), 0.0)):
        sent = [encode(_REFERENCE, x, plan) for x in order]
        words, payloads = joined(sent, device)
        out = torch.empty(2, device=device)
        kernels.decode_(words, payloads, plan, NO_SAMPLE_KEY, "nodes", out)
        require_equal(kernels, out, torch.full((2,), expected), "payloads are added in the order given")


def the_checksum_is_the_references(kernels: Kernels, device: str) -> None:
    for length in (0, 1, 7, 100, 5000):
        words = torch.from_numpy(np.random.default_rng(length).integers(-(1 << 31), 1 << 31, length, np.int32))
        for first in (0, 13, (1 << 33) + 7):
            got, expected = kernels.checksum(words.to(device), first), _REFERENCE.checksum(words, first)
            require(kernels, got == expected, f"checksum of {length} words from {first} on")


def fit_is_finite_and_below_the_largest_magnitude(kernels: Kernels, device: str) -> None:
    for dtype in DTYPES:
        top = torch.tensor(min(LARGEST_MAGNITUDE, torch.finfo(dtype).max), dtype=dtype)
        below = torch.nextafter(top.double(), torch.zeros(())) if dtype is torch.float64 else top.float() * (1 - 2**-8)
        verdicts = {0.0: True, float(below): True, -float(below): True, torch.nan: False, torch.inf: False}
        verdicts |= {-torch.inf: False, 2.0**100: False, -(2.0**100): False, 2.0**101: False}
        for value, verdict in verdicts.items():
            for x in (torch.zeros(()), torch.zeros(301), torch.zeros(20, 30)):
                holding = x.to(device, dtype)
                holding.view(-1)[-1] = value
                for one in (holding, with_gaps(holding)):
                    require(kernels, kernels.is_finite(one) is verdict, f"is_finite is {verdict} of {value} in {dtype}")
        require(kernels, kernels.is_finite(torch.zeros(0, dtype=dtype, device=device)), f"nothing is fit, {dtype}")


def mixing_gives_the_references_bits(kernels: Kernels, device: str) -> None:
    """Any dtype, any length, any number of others; into memory of its own, into ``x``, or into one of the others."""
    for dtype, length, (self_weight, weights), kind in product(DTYPES, _LENGTHS, _MIXTURES, ("normal", "wide", "tiny")):
        given = [numbers(kind, (length,), seed).to(dtype) for seed in range(1 + len(weights))]
        expected = torch.empty_like(given[0])
        far = _REFERENCE.mix_(given[0], self_weight, given[1:], weights, expected)
        for place in range(-1, min(2, len(given))):
            here = [one.to(device, copy=True) for one in given]
            out = torch.full_like(here[0], torch.nan) if place < 0 else here[place]
            got = kernels.mix_(here[0], self_weight, here[1:], weights, out)
            law = f"of {length} {kind} {dtype}, {self_weight} * x and {weights}, into number {place} of them"
            require_equal(kernels, out, expected, f"mix_ gives the reference's sum {law}")
            require_close(kernels, got, far, f"mix_ tells how far x moved {law}")
            for number, one in enumerate(here):
                require(kernels, number == place or torch.equal(one.cpu(), given[number]), f"mix_ reads only {law}")


def mixing_keeps_what_is_not_finite(kernels: Kernels, device: str) -> None:
    """A NaN may become any other NaN, but never a number; what is too large for a dtype becomes infinite."""
    for dtype in DTYPES:
        edges = [torch.nan, torch.inf, -torch.inf, 1.0, -0.0, torch.finfo(dtype).max, -torch.finfo(dtype).max]
        x, other = torch.cartesian_prod(*2 * [torch.tensor(edges, dtype=dtype)]).t().contiguous()
        for self_weight, weight in ((0.5, 0.5), (1.0, 1.0), (1.0, -1.0)):
            expected, out = torch.empty_like(x), torch.empty_like(x).to(device)
            _REFERENCE.mix_(x, self_weight, [other], [weight], expected)
            kernels.mix_(x.to(device), self_weight, [other.to(device)], [weight], out)
            law = f"what is not finite is mixed as IEEE has it, {self_weight} and {weight} of {dtype}"
            require_equal(kernels, out.isnan(), expected.isnan(), law)
            require_equal(kernels, out[~out.isnan()], expected[~expected.isnan()], law)


def what_has_no_weight_is_not_mixed_in(kernels: Kernels, device: str) -> None:
    for dtype in DTYPES:
        whole = torch.ones(70, dtype=dtype, device=device)
        broken, out = torch.full_like(whole, torch.nan), torch.full_like(whole, 7.0)
        for x, self_weight, others, weights in (
            (broken, 0.0, [whole], [1.0]),
            (whole, 1.0, [broken, broken], [0.0, 0.0]),
            (broken, 0.0, [broken, whole, broken], [0.0, 1.0, 0.0]),
        ):
            kernels.mix_(x, self_weight, others, weights, out.fill_(7.0))
            require_equal(kernels, out, whole, f"what has weight 0 does not matter: {self_weight}, {weights}, {dtype}")
        kernels.mix_(broken, 0.0, [], [], out)
        require_equal(kernels, out, torch.zeros(70, dtype=dtype), f"without any weight there is nothing: {dtype}")


KERNEL_LAWS: tuple[Callable[[Kernels, str], None], ...] = (
    encode_writes_the_references_words,
    encode_keeps_what_the_reference_keeps,
    zeros_keep_the_sign_the_reference_gives_them,
    encode_reports_a_broken_state,
    a_full_threshold_sends_exactly_its_capacity,
    many_broken_coefficients_are_not_overlooked,
    find_threshold_counts_what_the_reference_counts,
    counts_are_read_as_they_were_written,
    errors_are_found_where_the_reference_finds_them,
    the_first_kind_of_error_is_named,
    decode_gives_the_references_average,
    payloads_of_one_average_may_be_laid_out_differently,
    decode_adds_in_the_order_given,
    the_checksum_is_the_references,
    fit_is_finite_and_below_the_largest_magnitude,
    mixing_gives_the_references_bits,
    mixing_keeps_what_is_not_finite,
    what_has_no_weight_is_not_mixed_in,
)


def encode_case(kernels: Kernels, case: Case, x: Tensor, momentum: Momentum | None = None, sender: int = 0) -> Sent:
    momentum = case.momentum(str(x.device), sender) if momentum is None else momentum
    if case.code is None:
        return encode(kernels, x, case.plan, case.sample_key(), momentum)
    entries = case.plan.entries
    if case.plan.variable_length:
        entries = int(_REFERENCE.find_threshold(case.x(sender), case.plan, case.momentum("cpu", sender)).counts.sum())
    return encode(kernels, x, case.plan, case.sample_key(), momentum, case.layout(entries))


def entries_of(sent: Sent) -> int:
    return 0 if sent.payload.counts is None else int(sent.payload.counts.sum())


def joined(sent: list[Sent], device: str) -> tuple[Tensor, list[Payload]]:
    """Return payloads one behind the other, a word of garbage before each."""
    garbage = torch.full((1,), -1, dtype=torch.int32)
    words = torch.cat([part for one in sent for part in (garbage, one.words)])
    payloads, start = [], 1
    for one in sent:
        counts = one.payload.counts
        payloads.append(Payload(start, one.payload.layout, None if counts is None else counts.to(device)))
        start += one.words.numel() + 1
    return words.to(device), payloads


def require_decoded(kernels: Kernels, sent: list[Sent], case: Case, device: str, law: str) -> None:
    words, payloads = joined(sent, device)
    kept, payloads_here = words.clone(), joined(sent, "cpu")[1]
    averages: tuple[Average, ...] = get_args(Average)
    for average in averages:
        expected = torch.empty(case.shape, dtype=case.dtype)
        _REFERENCE.decode_(kept.cpu(), payloads_here, case.plan, case.sample_key(), average, expected)
        out = torch.full(case.shape, torch.nan, dtype=case.dtype, device=device)
        for place in (out, with_gaps(out)):
            kernels.decode_(words, payloads, case.plan, case.sample_key(), average, place)
            require_equal(kernels, place, expected, f"{law}, over {average}")
    require_equal(kernels, words, kept, f"decode_ leaves the payloads alone: {case}")


def bits_of(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(_INTEGERS[x.element_size()])


def require(kernels: Kernels, condition: bool, law: str) -> None:
    if not condition:
        raise AssertionError(f"{kernels.name} kernels: broken law: {law}")


def require_equal(kernels: Kernels, got: Tensor | None, expected: Tensor | None, law: str) -> None:
    """Raise unless both are there and equal in every bit, or neither is there: zeros have signs here."""
    if got is None or expected is None:
        require(kernels, got is expected, law)
    elif got.dtype != expected.dtype or got.shape != expected.shape or not torch.equal(bits_of(got), bits_of(expected)):
        raise AssertionError(f"{kernels.name} kernels: broken law: {law}\ngot      {got}\nexpected {expected}")


def require_close(kernels: Kernels, got: Tensor, expected: Tensor, law: str) -> None:
    """Raise unless both are float64 scalars and equal to rounding, which adding in another order does."""
    alike = got.dtype == expected.dtype and got.shape == expected.shape
    require(
        kernels, alike and torch.allclose(got.cpu(), expected, rtol=1e-12, atol=0.0), f"{law}: {got}, not {expected}"
    )
