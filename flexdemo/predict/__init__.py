"""``flexdemo predict``: what an iteration would take by each method, on links that were measured or are supposed.

``calibrate`` measures a cluster and writes a file; everything else reads it, or plain figures, and computes.
"""
