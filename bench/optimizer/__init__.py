"""``python -m bench optimizer``: the cost of a step of FlexDeMo, beside AdamW and detonation."""
