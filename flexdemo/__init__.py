"""Optimizers and hooks that train over slow links, built on flexcomm."""

__all__: list[str] = []
