"""``python -m bench demo``: a small GPT trained for equal seconds over slow links."""
