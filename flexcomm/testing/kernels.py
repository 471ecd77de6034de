"""The laws of kernel sets: the reference computes every bit, and a set computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, product
from random import Random
from typing import get_args

import torch
from torch import Tensor

from flexcomm.codec import assemble_buffer
from flexcomm.compress import TensorSpec
from flexcomm.kernels import (
    LARGEST_MAGNITUDE,
    Average,
    BucketDecoder,
    BufferPlan,
    Epilogue,
    EpilogueKind,
    Kernels,
    Problem,
    ReferenceKernels,
    Region,
    Selection,
    StateUpdate,
    Status,
    TensorPlan,
    ValueCode,
)
from flexcomm.kernels.layout import CHECKSUM_WORD, HEADER_NWORDS, checksum_of
from flexcomm.testing.cases import (
    DTYPES,
    SEQUENCE,
    BucketCase,
    Sent,
    coefficients_of,
    decode,
    encode,
    encode_bucket,
    numbers,
    require,
    require_equal,
    sampled_buckets,
    with_gaps,
)

_REFERENCE = ReferenceKernels()
_STEP = 5
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


def check_kernels(kernels: Kernels, device: str = "cpu") -> None:
    """Raise ``AssertionError`` unless ``kernels`` computes what the reference does, to the bit.

    The reference works on the CPU, whatever the device: its bits are the same everywhere, and there it is beyond doubt.
    """
    for law in KERNEL_LAWS:
        law(kernels, device)


def encode_fills_buffer_and_states_as_the_reference_does(kernels: Kernels, device: str) -> None:
    for bucket in sampled_buckets(30):
        tensors, states, expected_states = bucket.tensors(device), bucket.states(device), bucket.states("cpu")
        plan, update = bucket.plan, bucket.update
        sent = encode_bucket(kernels, plan, tensors, states, update, step=_STEP)
        expected = encode_bucket(_REFERENCE, plan, bucket.tensors("cpu"), expected_states, update, step=_STEP)
        require_status(kernels, sent.status, expected.status, f"encode_ returns the reference's status: {bucket}")
        require_equal(kernels, sent.words, expected.words, f"encode_ writes the reference's words: {bucket}")
        for x, before in zip(tensors, bucket.tensors("cpu"), strict=True):
            require_equal(kernels, x, before, f"encode_ leaves tensors alone: {bucket}")
        for got, wanted in zip(chain(*(states or ())), chain(*(expected_states or ())), strict=True):
            require_equal(kernels, got, wanted, f"what is not sent is kept, and a state apart left alone: {bucket}")


def zeros_keep_the_sign_the_reference_gives_them(kernels: Kernels, device: str) -> None:
    x = torch.tensor([-0.0, 0.0, 1.0, -1.0, -0.0, 0.25, -0.0, 0.0])
    for values in ValueCode:
        for selection, keep in ((Selection.EVERYTHING, 8), (Selection.TOP_K, 5), (Selection.STRIDING, 3)):
            plan = TensorPlan(1, 8, 1, 8, False, selection, keep, values)
            late, expected = torch.full((1, 8), -0.0, device=device), torch.full((1, 8), -0.0)
            sent = encode(kernels, x.to(device), plan, late, late)
            reference = encode(_REFERENCE, x, plan, expected, expected)
            require_equal(kernels, sent.words, reference.words, f"zeros are sent as the reference sends them: {plan}")
            require_equal(kernels, late, expected, f"zeros are kept as the reference keeps them: {plan}")


def a_nonfinite_state_is_named_and_the_buffer_marked(kernels: Kernels, device: str) -> None:
    """Also if all of it is: a threshold that rises must not rise above NaN, so that nothing would be sent."""
    broken_states = []
    for values, broken in product(ValueCode, (torch.nan, torch.inf, -torch.inf)):
        state = torch.zeros(2, 32)
        state[1, 7] = broken
        broken_states.append((TensorPlan(1, 64, 1, 32, False, Selection.TOP_K, 2, values), state))
    for bits in (0x7FFFFFFF, 0x7FC00000, 0x7F800000):
        plan = TensorPlan(1, 64, 1, 32, False, Selection.THRESHOLD, 5, ValueCode.BF16, tau=0.5)
        broken_states.append((plan, torch.full((2, 32), bits, dtype=torch.int32).view(torch.float32)))
    for plan, state in broken_states:
        sent = encode(kernels, torch.ones(64, device=device), plan, state.to(device), torch.empty(2, 32, device=device))
        require_status(kernels, sent.status, Status(Problem.STATE), f"a state that holds {state[1, 7]}: {plan}")
        require_marked(kernels, sent)


def a_full_threshold_sends_exactly_its_capacity(kernels: Kernels, device: str) -> None:
    """Equal magnitudes leave in the order of chunks and indices: none waits for ever behind the others."""
    plan = TensorPlan(1, 70, 1, 32, False, Selection.THRESHOLD, 40, ValueCode.FP32, tau=0.5)
    x = torch.ones(70)
    x[50] = 3.0
    rest = torch.zeros(plan.state_shape, device=device)
    encode(kernels, x.to(device), plan, rest, rest)
    expected = torch.nn.functional.pad(x, (0, 26))
    expected[:39], expected[50] = 0.0, 0.0
    require_equal(kernels, rest.view(-1), expected, f"the largest and then the first leave: {plan}")


def nonfinite_tensors_are_found_and_the_buffer_marked(kernels: Kernels, device: str) -> None:
    plan = TensorPlan(1, 600, 1, 100, False, Selection.EVERYTHING, 100, ValueCode.FP32)
    for dtype in DTYPES:
        top = torch.tensor(min(LARGEST_MAGNITUDE, torch.finfo(dtype).max), dtype=dtype)
        below = torch.nextafter(top.double(), torch.zeros(())) if dtype is torch.float64 else top.float() * (1 - 2**-8)
        finite = [0.0, float(below), -float(below)]
        for value in (*finite, torch.nan, torch.inf, -torch.inf, 2.0**100, -(2.0**100), 2.0**101):
            holding = torch.zeros(20, 30).to(device, dtype)
            holding.view(-1)[-1] = value
            for x in (holding, with_gaps(holding)):
                state, before = torch.ones(plan.state_shape, device=device), torch.ones(plan.state_shape)
                sent = encode(kernels, x, plan, state, torch.empty_like(state))
                require_equal(kernels, state, before, "a state with a successor of its own is left alone")
                expected = Status() if value in finite else Status(Problem.NONFINITE)
                require_status(kernels, sent.status, expected, f"{value} in {dtype}")
                if value not in finite:
                    require_marked(kernels, sent)


def the_first_nonfinite_tensor_is_named_before_any_nonfinite_state(kernels: Kernels, device: str) -> None:
    """Also if the state belongs to an earlier tensor: a tensor is found before anything is written."""
    for bucket in sampled_buckets(10, seed=7):
        tensors, states = bucket.tensors(device), bucket.states(device)
        named = [number for number, x in enumerate(tensors) if x.numel() and number > 0]
        for broken in (*(states[0][:1] if states else ()), *(tensors[number] for number in named)):
            broken.fill_(torch.nan)
        sent = encode_bucket(kernels, bucket.plan, tensors, states, bucket.update)
        if named:
            expected = Status(Problem.NONFINITE, tensor=named[0])
            require_status(kernels, sent.status, expected, f"the first tensor that is not finite is named: {bucket}")
            require_marked(kernels, sent)


def verify_finds_damage_as_the_reference_does(kernels: Kernels, device: str) -> None:
    """A bit that is wrong is found by the checksum; a payload's word, with a checksum that fits, by its problem."""
    random = Random(4)  # noqa: S311  (the same damage every time)
    for bucket in sampled_buckets(20, seed=4):
        words, regions = joined([send(_REFERENCE, bucket, sender) for sender in range(2)])
        require_status(kernels, verify(kernels, words.to(device), regions, bucket.plan), Status(), f"{bucket} is sound")
        for sender in random.choices(range(2), k=6):
            damaged, (_, start, nwords) = words.clone(), regions[sender]
            place = random.randrange(start, start + nwords)
            damaged[place] ^= 1 << random.randrange(31)
            got = verify(kernels, damaged.to(device), regions, bucket.plan)
            require_status(kernels, got, Status(Problem.HEADER, sender), f"a bit of word {place} is wrong: {bucket}")
            if nwords == HEADER_NWORDS:
                continue
            damaged, place = words.clone(), random.randrange(start + HEADER_NWORDS, start + nwords)
            damaged[place] = random.choice((0, -1, int(damaged[place]) ^ (1 << random.randrange(31))))
            reseal_(damaged[start : start + nwords])
            expected = verify(_REFERENCE, damaged, regions, bucket.plan)
            got = verify(kernels, damaged.to(device), regions, bucket.plan)
            require_status(kernels, got, expected, f"verify finds damage of word {place} as the reference: {bucket}")


def verify_compares_step_and_sequence(kernels: Kernels, device: str) -> None:
    bucket = sampled_buckets(1, seed=8)[0]
    words, regions = joined([send(_REFERENCE, bucket, sender) for sender in range(2)])
    decoder = kernels.decoder(bucket.plan, words.to(device), regions)
    for step, sequence in ((_STEP, SEQUENCE), (_STEP + 1, SEQUENCE), (_STEP, SEQUENCE + 1)):
        got = Status.of(int(decoder.verify(step=step, sequence=sequence)))
        expected = Status() if (step, sequence) == (_STEP, SEQUENCE) else Status(Problem.HEADER)
        require_status(kernels, got, expected, f"step {step}, sequence {sequence}")


def verify_names_the_first_sender_with_the_flag(kernels: Kernels, device: str) -> None:
    for bucket in sampled_buckets(6, seed=9):
        sent = [send(kernels, bucket, sender, device) for sender in range(3)]
        for sender in (1, 2):
            words = torch.full((bucket.plan.nwords,), -1, dtype=torch.int32, device=device)
            kernels.encoder(bucket.plan, words).mark_nonfinite_(step=_STEP, sequence=SEQUENCE)
            nwords = HEADER_NWORDS if bucket.plan.variable_length else bucket.plan.nwords
            sent[sender] = sent[sender]._replace(words=words[:nwords])
        words, regions = joined(sent)
        got = verify(kernels, words.to(device), regions, bucket.plan)
        require_status(kernels, got, Status(Problem.NONFINITE, 1), f"sender 1 is the first with the flag: {bucket}")


def the_first_kind_of_problem_is_named(kernels: Kernels, device: str) -> None:
    """Whatever chunk it is in, and however chunks are shared out."""
    plan = TensorPlan(1, 4096, 1, 64, False, Selection.TOP_K, 4, ValueCode.BF16)
    sent = encode(_REFERENCE, torch.randn(4096, generator=torch.Generator().manual_seed(0)), plan)
    layout, words = sent.plan.layouts[0], sent.words.clone()
    region = Region("sender", 0, words.numel())
    for place, word, problem in ((layout.values, 0x7FC07FC0, Problem.VALUE), (layout.scales - 1, 0, Problem.INDEX)):
        words[HEADER_NWORDS + place] = word
        reseal_(words)
        found = verify(kernels, words.to(device), [region], sent.plan, sent.step)
        require_status(kernels, found, Status(problem), f"{problem!r} is the first")


def decode_gives_the_references_average(kernels: Kernels, device: str) -> None:
    """Buffers lie one behind the other; outputs hold NaN before, and may have gaps.

    Payloads of variable length are as long as what they hold, so the shortest index code may differ between senders.
    """
    averages: tuple[Average, ...] = get_args(Average)
    for number, bucket in enumerate(sampled_buckets(24, seed=5)):
        words, regions = joined([send(_REFERENCE, bucket, sender) for sender in range(3 - number % 3)])
        here = words.to(device)
        for average in averages:
            expected = [torch.empty(case.shape, dtype=case.dtype) for case in bucket.cases]
            verified(_REFERENCE, words, regions, bucket.plan).decode_(expected, step=_STEP, average=average)
            for spread in (False, True):
                outs = [torch.full(case.shape, torch.nan, dtype=case.dtype, device=device) for case in bucket.cases]
                outs = [with_gaps(out) for out in outs] if spread else outs
                verified(kernels, here, regions, bucket.plan).decode_(outs, step=_STEP, average=average)
                for out, wanted in zip(outs, expected, strict=True):
                    require_equal(kernels, out, wanted, f"decode_ averages over {average} as the reference: {bucket}")
        require_equal(kernels, here, words, f"decode_ leaves the buffers alone: {bucket}")


def decode_adds_in_the_order_of_senders(kernels: Kernels, device: str) -> None:
    plan = TensorPlan(1, 2, 1, 2, False, Selection.EVERYTHING, 2, ValueCode.FP32)
    large, small = torch.tensor([2.0**60, -(2.0**60)]), torch.tensor([1.0, 1.0])
    for order, expected in (((large, -large, small), 1.0 / 3.0), ((large, small, -large), 0.0)):
        sent = [encode(_REFERENCE, x, plan) for x in order]
        words, regions = joined(sent)
        out = torch.empty(2, device=device)
        verified(kernels, words.to(device), regions, sent[0].plan, step=0).decode_([out], step=0, average="nodes")
        require_equal(kernels, out, torch.full((2,), expected), "payloads are added in the order of senders")


def sums_are_decoded_without_being_verified_and_divided_by_their_nodes(kernels: Kernels, device: str) -> None:
    """What nodes add up has no header any more; shared selections send no indices."""
    shared = (Selection.EVERYTHING, 64), (Selection.STRIDING, 9), (Selection.RANDOM_K, 4)
    for (selection, k), cut, nodes in product(shared, ((1, 256, 1, 64, False), (16, 16, 8, 8, True)), (1, 3)):
        plan = TensorPlan(*cut, selection, k, ValueCode.FP32)
        x, expected = numbers("normal", (plan.rows, plan.cols), 4), torch.empty(plan.rows, plan.cols)
        sent, out = encode(_REFERENCE, x, plan, step=_STEP), torch.empty_like(x, device=device)
        for one, filled in ((kernels, out), (_REFERENCE, expected)):
            words = sent.words.to(filled.device, copy=True)
            words[:HEADER_NWORDS] = 0
            decoder = one.decoder(sent.plan, words, [Region("sum", 0, words.numel())], summed=nodes)
            decoder.decode_([filled], step=_STEP, average="nodes")
        require_equal(kernels, out, expected, f"a sum over {nodes} nodes is divided by as many: {plan}")
        if nodes == 1:
            decode(_REFERENCE, sent, plan, expected)
            require_equal(kernels, out, expected, f"what one node sent is decoded as if verified: {plan}")


def outputs_step_as_the_epilogue_says(kernels: Kernels, device: str) -> None:
    for number, bucket in enumerate(sampled_buckets(10, seed=11)):
        words, regions = joined([send(_REFERENCE, bucket, sender) for sender in range(3 - number % 3)])
        averages = [torch.empty(case.shape) for case in bucket.cases]
        verified(_REFERENCE, words, regions, bucket.plan).decode_(averages, step=_STEP, average="contributors")
        kinds: tuple[EpilogueKind, ...] = ("sign_step", "plain_step")
        for kind, keep in product(kinds, (1.0, 0.9)):
            epilogue = Epilogue(kind, 0.01, keep)
            for spread in (False, True):
                params = [numbers("normal", case.shape, case.seed).to(case.dtype) for case in bucket.cases]
                moved = [with_gaps(param.to(device)) if spread else param.to(device, copy=True) for param in params]
                decoder = verified(kernels, words.to(device), regions, bucket.plan)
                decoder.decode_(moved, step=_STEP, average="contributors", epilogue=epilogue)
                for out, param, average in zip(moved, params, averages, strict=True):
                    wide = torch.float64 if param.dtype is torch.float64 else torch.float32
                    lr, kept = torch.tensor(0.01, dtype=wide), torch.tensor(keep, dtype=wide)
                    step = average.to(wide).sign() * lr if kind == "sign_step" else average.to(wide)
                    expected = (param.to(wide) * kept - step).to(param.dtype)
                    require_equal(kernels, out, expected, f"decode_ steps by {epilogue}: {bucket}")


def rollback_restores_states_that_were_updated_in_place(kernels: Kernels, device: str) -> None:
    """To the bits of the reference, and close to what they were."""
    for number, bucket in enumerate(sampled_buckets(10, seed=7)):
        update = bucket.update._replace(alpha=(1.0, 0.25)[number % 2])
        states = []
        for one, where in ((kernels, device), (_REFERENCE, "cpu")):
            tensors = bucket.tensors(where)
            own = [numbers("normal", case.plan.state_shape, case.seed).to(where) for case in bucket.cases]
            words = torch.zeros(bucket.plan.nwords, dtype=torch.int32, device=where)
            encoder = one.encoder(bucket.plan, words)
            require(kernels, int(encoder.encode_(tensors, own, own, update, step=_STEP, sequence=SEQUENCE)) == 0, "")
            encoded = [state.clone() for state in own]
            encoder.rollback_(tensors, own, update, step=_STEP)
            states.append(own)
        for got, wanted, after, case in zip(*states, encoded, bucket.cases, strict=True):
            require_equal(kernels, got, wanted, f"rollback_ gives the reference's states: {bucket}")
            before = numbers("normal", case.plan.state_shape, case.seed)
            # As close as ``rollback_`` promises: of what was sent nothing is larger than these three together.
            added = coefficients_of(_REFERENCE, case.x(), case.plan, None, StateUpdate(gain=update.gain))
            size = after.abs() + added.abs() + before.abs()
            far = (wanted - before).abs() - 8 * 2.0**-24 / update.decay * size
            require(kernels, bool((far <= 1e-44).all()), f"rollback_ restores states to rounding: {case}")


def a_problem_leaves_states_in_place_as_they_were(kernels: Kernels, device: str) -> None:
    plans = [
        TensorPlan(1, 9000, 1, 1024, False, Selection.TOP_K, 9, ValueCode.BF16),
        TensorPlan(200, 130, 64, 64, True, Selection.TOP_K, 9, ValueCode.FP32),
        TensorPlan(1, 9000, 1, 64, True, Selection.STRIDING, 9, ValueCode.SIGN),
        TensorPlan(1, 300, 1, 30, True, Selection.THRESHOLD, 90, ValueCode.FP32, tau=0.5),
    ]
    specs = tuple(TensorSpec(f"t{i}", (plan.rows, plan.cols), torch.float32) for i, plan in enumerate(plans))
    bucket, update = assemble_buffer(specs, tuple(plans)), StateUpdate(0.5, 0.75, 0.25)
    for broken, in_state in product(range(len(plans)), (False, True)):
        tensors = [numbers("normal", spec.shape, 1).to(device) for spec in specs]
        states = [numbers("normal", plan.state_shape, 2).to(device) for plan in plans]
        (states[broken].view(-1) if in_state else tensors[broken].view(-1))[-1] = torch.nan
        own = [state.clone() for state in states]
        found = encode_bucket(kernels, bucket, tensors, (own, own), update, step=_STEP).status
        wanted = Problem.STATE if in_state else Problem.NONFINITE
        # A threshold does not select what is not a number.
        require(kernels, found == Status(wanted, tensor=broken) or in_state, f"NaN in tensor {broken}: {found}")
        for state, before in zip(own, states, strict=True):
            if found.problem:
                close = torch.isclose(state, before, rtol=2.0**-18, atol=2.0**-18, equal_nan=True)
                require(kernels, bool(close.all()), f"NaN in tensor {broken} leaves the states of others alone")


def a_problem_leaves_states_as_they_were(kernels: Kernels, device: str) -> None:
    """Also behind a tensor without elements, whose states have no memory to tell them apart."""
    plans = (
        TensorPlan(1, 0, 1, 16, False, Selection.EVERYTHING, 16, ValueCode.FP32),
        TensorPlan(1, 90, 1, 30, False, Selection.TOP_K, 3, ValueCode.BF16),
    )
    specs = tuple(TensorSpec(f"t{i}", (plan.cols,), torch.float32) for i, plan in enumerate(plans))
    tensors = [torch.ones(plan.cols, device=device) for plan in plans]
    tensors[1][80] = torch.nan
    states = [numbers("normal", plan.state_shape, 1).to(device) for plan in plans]
    after = [torch.zeros_like(state) for state in states]
    found = encode_bucket(kernels, assemble_buffer(specs, plans), tensors, (states, after)).status
    require_status(kernels, found, Status(Problem.NONFINITE, tensor=1), "NaN behind an empty tensor")
    require_equal(kernels, states[1], numbers("normal", plans[1].state_shape, 1), "a state apart is left alone")


def a_buffer_is_decoded_as_another_plan(kernels: Kernels, device: str) -> None:
    """Coefficients that travel as they are can be transformed back by the receiver."""
    flat = TensorPlan(1, 256, 1, 64, False, Selection.TOP_K, 9, ValueCode.FP32)
    square = TensorPlan(16, 16, 8, 8, True, Selection.TOP_K, 9, ValueCode.FP32)
    x, expected, out = numbers("normal", (256,), 3), torch.empty(16, 16), torch.empty(16, 16, device=device)
    decode(_REFERENCE, encode(_REFERENCE, x, flat), square, expected)
    decode(kernels, encode(kernels, x.to(device), flat), square, out)
    require_equal(kernels, out, expected, "coefficients are transformed back as the other plan says")


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
    encode_fills_buffer_and_states_as_the_reference_does,
    zeros_keep_the_sign_the_reference_gives_them,
    a_nonfinite_state_is_named_and_the_buffer_marked,
    a_full_threshold_sends_exactly_its_capacity,
    nonfinite_tensors_are_found_and_the_buffer_marked,
    the_first_nonfinite_tensor_is_named_before_any_nonfinite_state,
    verify_finds_damage_as_the_reference_does,
    verify_compares_step_and_sequence,
    verify_names_the_first_sender_with_the_flag,
    the_first_kind_of_problem_is_named,
    decode_gives_the_references_average,
    decode_adds_in_the_order_of_senders,
    sums_are_decoded_without_being_verified_and_divided_by_their_nodes,
    outputs_step_as_the_epilogue_says,
    rollback_restores_states_that_were_updated_in_place,
    a_problem_leaves_states_in_place_as_they_were,
    a_problem_leaves_states_as_they_were,
    a_buffer_is_decoded_as_another_plan,
    mixing_gives_the_references_bits,
    mixing_keeps_what_is_not_finite,
    what_has_no_weight_is_not_mixed_in,
)


def send(kernels: Kernels, bucket: BucketCase, sender: int, device: str = "cpu") -> Sent:
    tensors, states = bucket.tensors(device, sender), bucket.states(device, sender)
    return encode_bucket(kernels, bucket.plan, tensors, states, bucket.update, step=_STEP)


def joined(sent: Sequence[Sent]) -> tuple[Tensor, list[Region]]:
    """Return buffers one behind the other, some words of garbage before each."""
    garbage, regions, start = torch.full((4,), -1, dtype=torch.int32), [], 4
    for number, one in enumerate(sent):
        regions.append(Region(f"sender {number}", start, one.words.numel()))
        start += one.words.numel() + 4
    return torch.cat([part for one in sent for part in (garbage, one.words.cpu())]), regions


def verify(kernels: Kernels, words: Tensor, regions: list[Region], plan: BufferPlan, step: int = _STEP) -> Status:
    return Status.of(int(kernels.decoder(plan, words, regions).verify(step=step, sequence=SEQUENCE)))


def verified(
    kernels: Kernels, words: Tensor, regions: list[Region], plan: BufferPlan, step: int = _STEP
) -> BucketDecoder:
    decoder = kernels.decoder(plan, words, regions)
    got = Status.of(int(decoder.verify(step=step, sequence=SEQUENCE)))
    require_status(kernels, got, Status(), f"sound buffers are verified: {plan}")
    return decoder


def reseal_(words: Tensor) -> None:
    """Make the checksum of a buffer fit what it holds now."""
    checksum = checksum_of(words.cpu().numpy())
    words[CHECKSUM_WORD] = checksum - (checksum >> 31 << 32)


def require_marked(kernels: Kernels, sent: Sent) -> None:
    """Raise unless a buffer says that its sender has nothing to send."""
    found = verify(kernels, sent.words, [Region("sender", 0, sent.words.numel())], sent.plan, sent.step)
    require_status(kernels, found, Status(Problem.NONFINITE), "the buffer is marked")


def require_status(kernels: Kernels, got: Status, expected: Status, law: str) -> None:
    require(kernels, got == expected, f"{law}: {got}, not {expected}")


def require_close(kernels: Kernels, got: Tensor, expected: Tensor, law: str) -> None:
    """Raise unless both are float64 scalars and equal to rounding, which adding in another order does."""
    alike = got.dtype == expected.dtype and got.shape == expected.shape
    close = alike and torch.allclose(got.cpu(), expected, rtol=1e-12, atol=0.0)
    require(kernels, close, f"{law}: {got}, not {expected}")
