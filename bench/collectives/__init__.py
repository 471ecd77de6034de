"""``python -m bench collectives`` and ``sweep``: averaging a tensor, by size and compressor."""
