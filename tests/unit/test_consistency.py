"""What a disagreement looks like to the person who gets it; that ranks find it is tested with real ranks."""

from __future__ import annotations

import json

import torch

from flexcomm.bootstrap.consistency import (
    REPORT_BYTES,
    ConsistencyCheck,
    decode_report,
    describe,
    digest_of,
    encode_report,
    name_ranks,
    shorten,
)
from flexcomm.transport import LoopbackTransport


def test_ranks_are_named_in_runs() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 1, 2, 7, 8]) == "ranks 0-2, 5, 7-8"


def test_a_disagreement_names_field_values_and_ranks_and_nothing_else() -> None:
    same = {"step": "3", "k": "32"}
    text = describe([same, same, {"step": "3", "k": "16", "extra": "1"}])
    assert "k: 32 on ranks 0-1; 16 on rank 2" in text
    assert "extra: (not set) on ranks 0-1; 1 on rank 2" in text
    assert "step" not in text


def test_the_digest_ignores_the_order_of_fields_and_nothing_else() -> None:
    assert digest_of({"a": "1", "b": "2"}) == digest_of({"b": "2", "a": "1"})
    assert digest_of({"a": "1", "b": "2"}) != digest_of({"a": "12", "b": ""})


def test_long_values_that_differ_late_still_differ_when_shortened() -> None:
    first, second = shorten("x" * 1000 + "a"), shorten("x" * 1000 + "b")
    assert first != second
    assert len(first) < 200


def test_a_report_fits_its_buffer_however_much_there_is_to_tell() -> None:
    settings = {f"field {i}": "v" * 199 for i in range(20_000)}
    text = encode_report(settings)
    assert len(text) <= REPORT_BYTES
    assert json.loads(text)["field 0"] == "v" * 199


def test_an_unreadable_report_is_said_to_be_one() -> None:
    row = torch.full((64,), 255, dtype=torch.uint8)
    assert "another version" in decode_report(row)["settings"]


def test_what_was_agreed_is_not_asked_again() -> None:
    class Counting(LoopbackTransport):
        gathers = 0

        def all_gather(self, x, out=None):  # type: ignore[no-untyped-def]
            Counting.gathers += 1
            return super().all_gather(x, out)

    consistency = ConsistencyCheck(Counting())
    for _ in range(5):
        consistency.check({"shape": (3, 4), "dtype": torch.float32})
    assert Counting.gathers == 1
    consistency.check({"shape": (3, 5), "dtype": torch.float32})
    assert Counting.gathers == 2
