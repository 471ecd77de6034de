"""``python -m bench runtime``: iteration times, predicted and measured on emulated clusters."""
