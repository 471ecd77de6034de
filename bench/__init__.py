"""Benchmarks of flexcomm and flexdemo, on real clusters and on emulated ones."""
