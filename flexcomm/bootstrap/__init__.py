"""Connecting: the ranks of a job find each other, make groups, compare settings, and report those that fail."""
