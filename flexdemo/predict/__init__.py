"""``flexdemo predict``: seconds per iteration by each method, on measured or assumed links.

``command`` is the command line. ``measure`` measures a cluster and writes a calibration file; ``scenario`` and
``methods`` compute from that file, or from numbers on the command line; ``report`` prints the result.
"""

__all__ = ["PredictError"]


class PredictError(Exception):
    """An argument or a file is invalid; the message says what was needed and what to do.

    The command line prints it and exits with ``exit_code``.
    """

    exit_code = 2
