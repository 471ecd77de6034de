"""Emulated clusters of slow links, and the launchers that start ranks on them or on this host alone."""

from bench.cluster.cluster import Cluster, ClusterSpec, Finished, open_cluster

__all__ = ["Cluster", "ClusterSpec", "Finished", "open_cluster"]
