"""``python -m bench mixing``: the processor time of mixing, beside decent-dp."""
