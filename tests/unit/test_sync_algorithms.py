"""What algorithms send, without any rank: a generator is driven by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexcomm.sync import algorithms


def test_lengths_travel_from_where_payloads_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that carries the payloads need not carry host tensors."""
    encoder = SimpleNamespace(payload_nbytes=torch.empty(1, dtype=torch.int64, device="meta"))
    monkeypatch.setattr(algorithms, "_encode_shard", lambda *_: encoder)
    ctx: Any = SimpleNamespace(buffer_plan=None, plan=SimpleNamespace(nodes=2))
    sent = []
    transport: Any = SimpleNamespace(all_gather=sent.append)
    next(algorithms.gatherv(ctx, [])).start(transport)
    assert [(x.device.type, x.dtype, x.shape) for x in sent] == [("meta", torch.int64, (1,))]
