"""Which way between nodes: the one with the fewest bytes through a node's cable, from sizes known beforehand.

With P nodes and buffers of B bytes, a node sends (P-1) B to gather, 2 (P-1)/P B to reduce, and (P-1)/P (B + A) to
split, where A is the length of all averages. Sending everything costs 2 (P-1)/P N, for tensors of N bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from flexcomm.between.reduce import can_be_reduced
from flexcomm.between.split import can_be_split, plan_split
from flexcomm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from flexcomm.bucket import BucketPlan
    from flexcomm.pieces import Piece

__all__ = ["Algorithm", "Way", "choose_way", "sent_bytes"]

Way = Literal["gather", "gatherv", "reduce", "split", "dense"]
Algorithm = Literal["auto", "gather", "gatherv", "reduce", "split", "dense"]


def sent_bytes(plan: BucketPlan, dense: BucketPlan, pieces: tuple[Piece, ...], nodes: int) -> dict[Way, float]:
    """Return what a node sends by each way that is open to this bucket. ``dense`` is the plan that sends everything."""
    others, share = nodes - 1, (nodes - 1) / nodes
    sent: dict[Way, float] = {"dense": 2 * share * dense.nbytes}
    if plan.exact:
        return sent | {"gatherv": others * plan.nbytes}
    sent |= {"gather": others * plan.nbytes, "gatherv": others * plan.nbytes}
    if can_be_reduced(plan, nodes):
        sent["reduce"] = 2 * share * plan.nbytes
    if can_be_split(plan):
        averages = sum(one.averaged.nbytes for one in plan_split(pieces, nodes).shares)
        sent["split"] = share * (plan.nbytes + averages)
    return sent


def choose_way(algorithm: Algorithm, plan: BucketPlan, sent: dict[Way, float]) -> Way:
    """Return the way a bucket goes: the one asked for or, of those open to it, the shortest."""
    if algorithm == "auto":
        if plan.exact:
            return "gatherv"
        # Of equals the first: gathered buffers carry headers and checksums, sums do not.
        order: tuple[Way, ...] = ("gather", "reduce", "split", "dense")
        return min((way for way in order if way in sent), key=lambda way: sent[way])
    if algorithm not in sent:
        raise InvalidArgumentError(
            f"algorithm {algorithm!r} cannot carry this compressor, but {', '.join(sorted(sent))} and auto can: reduce "
            f"needs shared indices and fp32, bf16 or fp16 values, split needs top-k, gather a length known beforehand."
        )
    return algorithm
