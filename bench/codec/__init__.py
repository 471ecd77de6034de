"""``python -m bench codec``: speed, bits, memory and error of compression."""
