"""The prediction as JSON. docs/predict.md describes it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from flexdemo.predict.errors import PredictError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from flexdemo.predict.prediction import Curve, Row, Scene
    from flexdemo.predict.recommendation import Recommendation

__all__ = ["write_report"]

SCHEMA = "flexdemo-prediction"
VERSION = 1


def write_report(
    file: Path,
    scene: Scene,
    rows: Sequence[Row],
    recommendation: Recommendation,
    skipped: Mapping[str, str],
    curves: Mapping[str, Sequence[Curve]],
) -> None:
    """Write everything that was supposed and predicted."""
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "scene": _without_infinity(asdict(scene)),
        "rows": [asdict(row) for row in rows],
        "recommendation": asdict(recommendation),
        "skipped": dict(skipped),
        **{name: [asdict(curve) for curve in each] for name, each in curves.items()},
    }
    try:
        file.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise PredictError(f"cannot write to {file}: {error.strerror}. Give --json another file.") from error


def _without_infinity(value: object) -> object:
    """Return the value with None instead of infinity, which JSON cannot write: a rate nobody limits."""
    if isinstance(value, dict):
        return {name: _without_infinity(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value
