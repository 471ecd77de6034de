"""Hooks: a model's own gradient reduction calls them, and the optimizer stays the user's."""
