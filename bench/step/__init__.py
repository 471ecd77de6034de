"""``python -m bench step``: the communication of one optimizer step, beside that of others."""
