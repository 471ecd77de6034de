"""What a group of the backend is told: by its options, for a process, or by environment variables."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch

from flexcomm import compress
from flexcomm.compress import Compressor, dense
from flexcomm.errors import CompressorError, InvalidArgumentError
from flexcomm.kernels import Average
from flexcomm.torch_private import GroupOptions

NAME = "flexcomm"
COMPRESSOR_VARIABLE = "FLEXCOMM_COMPRESSOR"
MIN_BYTES = 64 << 10
DEFAULT_COMPRESSOR = dense(values="sign2")
NonFinite = Literal["nan", "raise", "zero"]
_RECIPES = ("demo", "top_k", "threshold", "random_k", "striding", "sign", "dense")


@dataclass(frozen=True)
class BackendSettings:
    """What a group does; equal on all its ranks. The arguments of :class:`BackendOptions`."""

    compressor: Compressor = DEFAULT_COMPRESSOR
    decay: float = 1.0
    alpha: float = 1.0
    average: Average = "nodes"
    min_bytes: int = MIN_BYTES
    start_step: int = 1
    bucket_bytes: int | None = None
    nonfinite: NonFinite = "nan"

    def __post_init__(self) -> None:
        given: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}  # whatever callers passed
        wrong = [
            f"{name} is {given[name]!r}, but must be {needed}"
            for name, needed, holds in (
                ("compressor", "a compressor, such as flexcomm.demo(k=32)", hasattr(self.compressor, "plan")),
                ("decay", "a number from 0 to 1", _is_number(given["decay"]) and 0.0 <= self.decay <= 1.0),
                ("alpha", "a number above 0, at most 1", _is_number(given["alpha"]) and 0.0 < self.alpha <= 1.0),
                ("average", f"one of {', '.join(get_args(Average))}", self.average in get_args(Average)),
                ("min_bytes", "a whole number from 0 on", type(self.min_bytes) is int and self.min_bytes >= 0),
                ("start_step", "a whole number from 0 on", type(self.start_step) is int and self.start_step >= 0),
                (
                    "bucket_bytes",
                    "a whole number from 1 on, or None",
                    self.bucket_bytes is None or (type(self.bucket_bytes) is int and self.bucket_bytes > 0),
                ),
                ("nonfinite", f"one of {', '.join(get_args(NonFinite))}", self.nonfinite in get_args(NonFinite)),
            )
            if not holds
        ]
        if wrong:
            raise InvalidArgumentError(f"{'; '.join(wrong)}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class BackendOptions(GroupOptions):
    """Options of a group of the backend ``"flexcomm"``, for a mesh's ``backend_override`` or a group's ``pg_options``.

    All-reduces of sums and averages of floating tensors travel between nodes as ``compressor`` says, and what is not
    sent is added to the same tensor of the next step. Everything else is exact: other verbs and operations, other
    dtypes, small tensors, the first steps, and groups inside one node. All ranks of a group pass equal options.

    Args:
        compressor: what is sent between nodes; ``flexcomm.dense()`` makes every call exact.
        decay: the share of the residual that is left after a step.
        alpha: the share of what was sent that is taken out of the residual.
        average: divide by all ``"nodes"``, or by the ``"contributors"`` of each coefficient.
        min_bytes: smaller tensors are exact: norms, losses, counts.
        start_step: how many steps are exact at first; DDP changes its buckets after one.
        bucket_bytes: cut longer lists of tensors; None: what torch passes in one call travels together.
        nonfinite: what NaN or infinity on any rank does to the tensor on all ranks: ``"nan"`` fills it, so that a
            loss scaler skips the step; ``"raise"``; ``"zero"``: such elements count as zero.

    Raises:
        InvalidArgumentError: an argument is not what it must be; it says which.

    Example:
        >>> import flexcomm
        >>> flexcomm.BackendOptions(flexcomm.dense(values="sign2"), min_bytes=1 << 20).settings.min_bytes
        1048576

    """

    def __init__(
        self,
        compressor: Compressor = DEFAULT_COMPRESSOR,
        *,
        decay: float = 1.0,
        alpha: float = 1.0,
        average: Average = "nodes",
        min_bytes: int = MIN_BYTES,
        start_step: int = 1,
        bucket_bytes: int | None = None,
        nonfinite: NonFinite = "nan",
    ) -> None:
        super().__init__(NAME)
        self.settings = BackendSettings(
            compressor, decay, alpha, average, min_bytes, start_step, bucket_bytes, nonfinite
        )


_configured: BackendSettings | None = None
_exact_regions = 0


def configure_backend(options: BackendOptions | None) -> None:
    """Set what groups do that are made without options of their own, for frameworks that take only a backend's name.

    Args:
        options: those of later groups; None forgets what was set.

    Example:
        >>> import flexcomm
        >>> flexcomm.configure_backend(flexcomm.BackendOptions(flexcomm.demo(k=32)))
        >>> flexcomm.configure_backend(None)  # as it was

    """
    global _configured
    _configured = None if options is None else options.settings


def settings_for(options: object) -> BackendSettings:
    """Return the settings of a group: of its options, else as configured, else as the environment says."""
    if isinstance(options, BackendOptions):
        return options.settings
    if options is not None:
        raise InvalidArgumentError(
            f"got {type(options).__name__} for a group of the backend {NAME!r}: pass flexcomm.BackendOptions(...)."
        )
    if _configured is not None:
        return _configured
    text = os.environ.get(COMPRESSOR_VARIABLE)
    return BackendSettings() if text is None else replace(BackendSettings(), compressor=parse_compressor(text))


def parse_compressor(text: str) -> Compressor:
    """Return the compressor that a recipe's call in Python stands for, such as ``demo(k=32)``; nothing is evaluated.

    Raises:
        CompressorError: it is no such call, or the recipe refuses its arguments.

    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in _RECIPES:
            raise ValueError(f"a call of one of {', '.join(_RECIPES)} is needed")
        arguments = [ast.literal_eval(one) for one in call.args]
        options = {one.arg: _value_of(one.value) for one in call.keywords if one.arg is not None}
        if len(options) < len(call.keywords):
            raise ValueError("arguments must be written out")
        compressor: Compressor = getattr(compress, call.func.id)(*arguments, **options)
    except (SyntaxError, ValueError, TypeError) as error:
        raise CompressorError(
            f"{COMPRESSOR_VARIABLE}={text!r} is not a compressor: {error}. Write it as in Python, such as demo(k=32) "
            f"or dense(values='sign2')."
        ) from error
    return compressor


def _value_of(node: ast.expr) -> object:
    """Return a literal, or one of torch's dtypes."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        value = getattr(torch, node.attr, None)
        if isinstance(value, torch.dtype):
            return value
    return ast.literal_eval(node)


@contextmanager
def exact() -> Iterator[None]:
    """Pass on every all-reduce inside the region uncompressed, in all threads and groups; all ranks enter it together.

    Example:
        >>> import flexcomm
        >>> with flexcomm.exact():
        ...     pass  # validation, or a gradient that must not be approximated

    """
    global _exact_regions
    _exact_regions += 1
    try:
        yield
    finally:
        _exact_regions -= 1


def is_exact_region() -> bool:
    return _exact_regions > 0
