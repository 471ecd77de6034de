"""Checkpoints: state that differs from node to node, saved with a node axis and loaded by any number of nodes."""
