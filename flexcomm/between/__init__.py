"""Between nodes: the ways from what each node holds to the average all of them get.

Each way is a generator: it yields what it waits for and is sent the result, so that whoever drives it can keep many
under way. It fills ``cargo.outputs``, unless somebody had nothing fit to send; then it returns who, and fills nothing.
"""

from collections.abc import Callable

from flexcomm.between.cargo import Cargo, Leg, Memory, Pending
from flexcomm.between.choice import Algorithm, Way, choose_way, sent_bytes
from flexcomm.between.gather import decode_gathered_, expect, gather, gather_payloads, gatherv
from flexcomm.between.reduce import densified, reduce
from flexcomm.between.split import split

WAYS: dict[Way, Callable[[Cargo], Leg]] = {
    "gather": gather,
    "gatherv": gatherv,
    "reduce": reduce,
    "split": split,
    "dense": reduce,
}

__all__ = [
    "WAYS",
    "Algorithm",
    "Cargo",
    "Leg",
    "Memory",
    "Pending",
    "Way",
    "choose_way",
    "decode_gathered_",
    "densified",
    "expect",
    "gather_payloads",
    "sent_bytes",
]
