"""``python -m bench sync``: the cost of a synchronisation beside its bytes."""
