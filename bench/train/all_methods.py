"""All methods of all commands that train, by name: what ranks, watchers and learning rates look them up in."""

from collections.abc import Mapping

from bench.train.decentralized_methods import DECENTRALIZED_METHODS
from bench.train.methods import METHODS, Method

LINEUP: Mapping[str, Method] = {**METHODS, **DECENTRALIZED_METHODS}
