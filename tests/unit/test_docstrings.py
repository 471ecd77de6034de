"""Public callables answer a user's questions: explicit arguments, each of them explained, and examples that run."""

from __future__ import annotations

import doctest
import inspect
import re
from typing import TYPE_CHECKING, Any, Protocol

import pytest

import flexcomm
import flexdemo

if TYPE_CHECKING:
    from collections.abc import Callable

CALLABLES = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (flexcomm, flexdemo)
    for name in package.__all__
    if inspect.isfunction(getattr(package, name))
    or (
        inspect.isclass(getattr(package, name))
        and not issubclass(getattr(package, name), Exception)
        and Protocol not in getattr(package, name).__bases__
    )
}
MADE_BY_US = {
    "flexcomm.MixHandle",
    "flexcomm.MixResult",
    "flexcomm.SyncHandle",
    "flexcomm.SyncPlan",
    "flexcomm.TensorPlan",
    "flexcomm.TensorShard",
    "flexcomm.Topology",
    "flexcomm.World",
    "flexdemo.HookHandle",
}
"""What users are given, and do not construct."""
ASKED_BY_TORCH = {"flexdemo.compression_hook"}
LIKE = {
    "flexcomm.start_sync": "hierarchical_sync",
    "flexcomm.start_exchange": "hierarchical_sync",
    "flexcomm.start_mix": "mix",
}
"""Callables with the arguments of another, which their docstring names."""


def parameters_of(one: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: value for name, value in inspect.signature(one).parameters.items() if name != "self"}


@pytest.mark.parametrize("name", sorted(CALLABLES.keys()))
def test_arguments_are_explicit(name: str) -> None:
    kinds = {value.kind for value in parameters_of(CALLABLES[name]).values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.parametrize("name", sorted(CALLABLES.keys() - MADE_BY_US - ASKED_BY_TORCH))
def test_every_argument_is_explained(name: str) -> None:
    parameters, text = parameters_of(CALLABLES[name]), inspect.getdoc(CALLABLES[name]) or ""
    if name in LIKE:
        assert f":func:`{LIKE[name]}`" in text
    elif len(parameters) > 1:
        documented = re.findall(r"^ {4,8}(\w+): ", text, re.MULTILINE)
        assert [one for one in parameters if one not in documented] == []


@pytest.mark.parametrize("name", sorted(CALLABLES))
def test_examples_run(name: str) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(CALLABLES[name], name)
    runner = doctest.DocTestRunner(verbose=False)
    for test in tests:
        shown: list[str] = []
        assert runner.run(test, out=shown.append).failed == 0, "".join(shown)
