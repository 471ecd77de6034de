"""Compressors: which part of a tensor is sent, and how its values are written. Mathematics only."""

from flexcomm.compress.parts import Dct, Everything, Identity, RandomK, Striding, Threshold, TopK, TopRate
from flexcomm.compress.pipeline import Compressor, Pipeline
from flexcomm.compress.recipes import demo, dense, random_k, sign, striding, threshold, top_k
from flexcomm.kernels import TensorSpec, ValueName

__all__ = [
    "Compressor",
    "Dct",
    "Everything",
    "Identity",
    "Pipeline",
    "RandomK",
    "Striding",
    "TensorSpec",
    "Threshold",
    "TopK",
    "TopRate",
    "ValueName",
    "demo",
    "dense",
    "random_k",
    "sign",
    "striding",
    "threshold",
    "top_k",
]
