"""Every deliberate error of the benchmarks.

BenchError                      a message for the user; the command line prints it and exits with its code
|-- UsageError                  an argument or a file says something we cannot act on
|-- ClusterUnavailableError     this machine cannot emulate a cluster
|-- LauncherMissingError        the launcher that was asked for is not installed
|-- CompilerMissingError        neither NVRTC nor nvcc is installed
`-- RateNotKeptError            a link of the emulated cluster does not have the rate it promises
"""


class BenchError(Exception):
    """A message for the user, and the code the command line exits with."""

    exit_code = 2


class UsageError(BenchError):
    """An argument or a settings file says something we cannot act on."""


class ClusterUnavailableError(BenchError):
    """The machine cannot emulate a cluster: no root, no iproute2, or a kernel without veth or tbf."""


class LauncherMissingError(BenchError):
    """The launcher that was asked for is not installed."""


class CompilerMissingError(BenchError):
    """Neither NVRTC nor nvcc is installed."""


class RateNotKeptError(BenchError):
    """A link of the emulated cluster is faster or slower than promised, so no figure would mean anything."""

    exit_code = 3
