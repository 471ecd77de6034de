"""Decentralized training: replicas mix their parameters with those of few nodes, behind a whole iteration."""

from flexdemo.decentralized.consensus import ConsensusControl
from flexdemo.decentralized.optimizer import DecentralizedAdam, DecentralizedOptimizer

__all__ = ["ConsensusControl", "DecentralizedAdam", "DecentralizedOptimizer"]
