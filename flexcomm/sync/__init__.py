"""Synchronisation: ``hierarchical_sync`` and its parts.

``api`` has the verbs, ``call`` the handle they return, ``bucket`` the path of one bucket, ``algorithms`` how it crosses
between nodes, ``plan`` what follows from shapes, ``engine`` what drives the buckets of all calls.
"""
