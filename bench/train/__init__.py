"""``python -m bench train``: a small GPT trained by several methods, beside AdamW."""
