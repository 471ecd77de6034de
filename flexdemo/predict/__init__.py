"""``flexdemo predict``: seconds per iteration by each method, on measured or assumed links.

``command`` is the command line. ``measure`` measures a cluster and writes a calibration file; ``scenario``, ``methods``
and ``prediction`` compute from that file, or from numbers on the command line; ``report`` prints the result.
"""
