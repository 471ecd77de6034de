"""Recipes: named compositions, one call each. ``docs/compressors.md`` says which one is for which link."""

from __future__ import annotations

from typing import cast

import torch

from flexcomm.compress.parts import Dct, Everything, Identity, RandomK, Striding, Threshold, TopK, TopRate
from flexcomm.compress.pipeline import DTYPES, Pipeline
from flexcomm.errors import CompressorError
from flexcomm.kernels import ValueCode, ValueName


def demo(k: int = 32, chunk: int = 64, values: ValueName = "bf16") -> Pipeline:
    """Send the ``k`` fastest-moving components of every chunk of ``chunk x chunk``: DeMo's rule.

    Args:
        k: components sent of each chunk.
        chunk: the side of a chunk; the chunks of a flat tensor hold ``chunk`` elements.
        values: how a value is written: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"sign"``, ``"sign2"`` (three
            bits), or ``"native"``, as the tensor's own dtype is.

    Example:
        >>> import flexcomm
        >>> flexcomm.demo(k=32)
        Pipeline(basis=Dct(chunk=64), selector=TopK(k=32), values='bf16')

    """
    return Pipeline(Dct(chunk), TopK(k), values)


def top_k(rate: float, values: ValueName = "bf16") -> Pipeline:
    """Send the share ``rate`` of largest magnitude.

    Args:
        rate: the share of elements that is sent, above 0, at most 1.
        values: how a value is written: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"sign"``, ``"sign2"`` (three
            bits), or ``"native"``, as the tensor's own dtype is.

    Example:
        >>> import flexcomm
        >>> flexcomm.top_k(1 / 32)
        Pipeline(basis=Identity(chunk=4096), selector=TopRate(rate=0.03125), values='bf16')

    """
    return Pipeline(Identity(), TopRate(rate), values)


def threshold(tau: float, capacity: float | None = 1 / 16, values: ValueName = "bf16") -> Pipeline:
    """Send every element whose magnitude reaches ``tau``.

    Args:
        tau: the least magnitude that is sent.
        capacity: the largest share of elements that is sent; None: without limit, and nodes exchange lengths first.
        values: how a value is written: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"sign"``, ``"sign2"`` (three
            bits), or ``"native"``, as the tensor's own dtype is.

    Example:
        >>> import flexcomm
        >>> flexcomm.threshold(0.1)
        Pipeline(basis=Identity(chunk=4096), selector=Threshold(tau=0.1, capacity=0.0625), values='bf16')

    """
    return Pipeline(Identity(), Threshold(tau, capacity), values)


def random_k(rate: float, seed: int = 0, values: ValueName = "bf16") -> Pipeline:
    """Send a random share, the same on every rank: no indices travel, and it scales to many nodes.

    Args:
        rate: the share of elements that is sent in a step.
        seed: of the random order, which also depends on the step and the tensor's name.
        values: how a value is written: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"sign"``, ``"sign2"`` (three
            bits), or ``"native"``, as the tensor's own dtype is.

    Example:
        >>> import flexcomm
        >>> flexcomm.random_k(1 / 32, seed=3)
        Pipeline(basis=Identity(chunk=4096), selector=RandomK(rate=0.03125, seed=3), values='bf16')

    """
    return Pipeline(Identity(), RandomK(rate, seed), values)


def striding(rate: float, values: ValueName = "bf16") -> Pipeline:
    """Send evenly spaced elements, moving on by one with every step; no indices travel.

    Args:
        rate: the share of elements that is sent in a step.
        values: how a value is written: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"sign"``, ``"sign2"`` (three
            bits), or ``"native"``, as the tensor's own dtype is.

    Example:
        >>> import flexcomm
        >>> flexcomm.striding(1 / 32)
        Pipeline(basis=Identity(chunk=4096), selector=Striding(rate=0.03125), values='bf16')

    """
    return Pipeline(Identity(), Striding(rate), values)


def sign(values: ValueName = "sign") -> Pipeline:
    """Send every element's sign, and one magnitude for every chunk.

    Args:
        values: ``"sign"``, or ``"sign2"``, which adds two bits of magnitude to each sign.

    Example:
        >>> import flexcomm
        >>> flexcomm.sign()
        Pipeline(basis=Identity(chunk=4096), selector=Everything(), values='sign')

    """
    return Pipeline(Identity(), Everything(), values)


def dense(dtype: torch.dtype | None = None, values: ValueName = "native") -> Pipeline:
    """Send everything.

    Args:
        dtype: how values are written, even if it is wider than the tensor's dtype; None: as ``values`` says.
        values: how a value is written: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"sign"``, ``"sign2"`` (three
            bits), or ``"native"``, as the tensor's own dtype is.

    Example:
        >>> import flexcomm
        >>> flexcomm.dense(values="sign2")
        Pipeline(basis=Identity(chunk=4096), selector=Everything(), values='sign2')

    """
    if dtype is None:
        return Pipeline(Identity(), Everything(), values)
    if dtype not in DTYPES or values != "native":
        raise CompressorError(
            f"dense cannot send as dtype={dtype!r} with values={values!r}: give one of {', '.join(map(str, DTYPES))} "
            f"as dtype, or values alone."
        )
    # A cast: the names of the codes are the members of ValueName, which a test holds.
    return Pipeline(Identity(), Everything(), cast("ValueName", ValueCode.of(dtype).name.lower()))
