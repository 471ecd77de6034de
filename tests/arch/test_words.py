"""Names use the words of docs/glossary.md: those that were replaced do not come back as names of classes and functions.

A word is gone in one meaning. Where a name uses it in another, the name is allowed below, and the reason with it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

REPLACED = {
    "abandon": "cancel",
    "adopt": "wrap a process group",
    "alone": "node_only",
    "announcement": "rank info",
    "arrive": "wait_received",
    "beside": "clone_groups",
    "cable": "transport, or a cluster's link",
    "cabling": "process groups",
    "cargo": "bucket context",
    "carrier": "comm thread",
    "contestant": "method",
    "densified": "dense plan",
    "desk": "encoder, decoder, or scratch",
    "envelope": "header",
    "everybodys": "of all ranks",
    "fault": "payload error",
    "feed": "gradient sync",
    "flagged": "nonfinite",
    "habits": "common options",
    "heard": "received",
    "incoming": "decoder",
    "inquiry": "hang report",
    "itinerary": "sync plan",
    "joined": "weighted sum",
    "judge": "monitor",
    "keeper": "namespace holder",
    "kept": "k, held, or self weight",
    "landing": "staging buffer",
    "lane": "communicator",
    "ledger": "stats",
    "leftovers": "stale clusters",
    "letter": "message",
    "lot": "bucket",
    "luggage": "bucket context",
    "outgoing": "encoder",
    "outline": "plan",
    "piece": "shard",
    "readiness": "ready buckets",
    "rooms": "buffer pool",
    "route": "bucket plan",
    "scene": "scenario",
    "settle": "finish",
    "slot": "residual shard",
    "stage": "bucket",
    "survey": "threshold counts",
    "terms": "settings",
    "trainee": "training run",
    "trip": "task",
    "turn": "round",
    "undo": "rollback",
    "unfit": "nonfinite",
    "visits": "cluster runs",
    "walk": "sync bucket",
    "walker": "bucket task",
    "way": "algorithm",
    "whole": "unsharded",
}

ALLOWED = {
    "RateNotKeptError": "a rate that was promised and not kept",
    "StageTime": "a part of encode or of decode",
    "_compare_speed_with_kept_memory": "memory the allocator keeps",
    "_count_kept": "elements sent",
    "_format_stage": "a part of encode or of decode",
    "_is_whole": "a chunk that lies inside the tensor",
    "_lane_sum": "lanes of a vector unit",
    "_measure_alone": "without a second process",
    "_measure_stages": "parts of encode and of decode",
    "_round_trip": "encode and decode",
    "_turn": "a rotation of the transform",
    "is_kept_by": "a bound that is kept",
    "joined": "vectors put together",
    "measure_alone": "without communication",
    "measure_stages": "parts of encode and of decode",
    "several_are_under_way_at_once": "not finished",
    "whole_parameters": "parameters gathered from all shards",
}


def words_of(name: str) -> list[str]:
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().strip("_").split("_")


def named() -> dict[str, set[str]]:
    """Return the names of classes and functions, and where they are."""
    found: dict[str, set[str]] = {}
    for package in ("flexcomm", "flexdemo", "bench"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    found.setdefault(node.name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def plural_of(word: str) -> str:
    return f"{word}s"


def test_words_that_were_replaced_are_gone() -> None:
    gone = REPLACED.keys() | {plural_of(word) for word in REPLACED}
    wrong = {
        name: sorted(places) for name, places in named().items() if name not in ALLOWED and gone & set(words_of(name))
    }
    assert not wrong


def test_the_list_of_allowed_names_holds_no_others() -> None:
    assert not ALLOWED.keys() - named().keys(), "take them off the list"
