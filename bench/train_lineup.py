"""All methods of all commands that train, by name: what ranks, watchers and learning rates look them up in."""

from collections.abc import Mapping

from bench.decentralized_methods import DECENTRALIZED_METHODS
from bench.train_methods import METHODS, Method

LINEUP: Mapping[str, Method] = {**METHODS, **DECENTRALIZED_METHODS}
