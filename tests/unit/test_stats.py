"""Statistics add up, remember the last synchronisations, and can be written as JSON."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

import flexcomm
from flexcomm.stats import SyncRecord, Timed


def record(factor: int) -> SyncRecord:
    """A record whose fields are all different, and all exact."""
    return SyncRecord(**{one.name: factor * (number + 1) for number, one in enumerate(fields(SyncRecord))})


def test_adding_a_record_adds_every_field() -> None:
    total = record(3)
    total.add(record(4))
    assert total == record(7)


def test_a_collective_is_counted_at_its_level() -> None:
    one = SyncRecord()
    one.count("intra", 10, 20)
    one.count("inter", 1, 2)
    one.count("inter", 3, 4)
    assert (one.intra_collectives, one.intra_sent_bytes, one.intra_received_bytes) == (1, 10, 20)
    assert (one.inter_collectives, one.inter_sent_bytes, one.inter_received_bytes) == (2, 4, 6)


def test_seconds_are_added_to_their_phase_also_when_the_block_raises() -> None:
    one = SyncRecord()
    one.add_seconds("encode", 1.5)
    one.add_seconds("encode", 0.5)
    with pytest.raises(KeyError), Timed(one, "decode"):
        raise KeyError
    assert one.encode_s == 2.0
    assert one.decode_s > 0.0


def test_compression_is_the_ratio_of_lengths_and_one_where_nothing_was_sent() -> None:
    assert SyncRecord(dense_bytes=400, payload_bytes=16).as_dict()["compression"] == 25.0
    assert SyncRecord().as_dict()["compression"] == 1.0


def test_a_world_holds_the_sum_of_all_and_the_last_256_one_by_one() -> None:
    world = flexcomm.connect()
    for number in range(300):
        world.add_stats(SyncRecord(syncs=1, dense_bytes=number), sequence=number, step=7)
    assert world.stats()["syncs"] == 300
    assert world.stats()["dense_bytes"] == sum(range(300))
    assert [one["sequence"] for one in world.recent_syncs()] == list(range(44, 300))
    assert world.recent_syncs()[-1]["dense_bytes"] == 299


def test_what_was_added_does_not_change_with_its_record() -> None:
    world, one = flexcomm.connect(), SyncRecord(syncs=1)
    world.add_stats(one)
    one.syncs = 5
    assert world.stats()["syncs"] == 1
    assert world.recent_syncs()[0]["syncs"] == 1


def test_everything_can_be_written_as_json_and_read_back() -> None:
    world = flexcomm.connect()
    world.add_stats(record(2), sequence=3)
    told = [world.stats(), *world.recent_syncs()]
    assert json.loads(json.dumps(told)) == told
