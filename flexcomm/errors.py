"""Every error this library raises on purpose.

::

    FlexcommError
    ├── InvalidArgumentError          an argument that can mean nothing here (also a ValueError)
    ├── InvalidTensorError            a tensor that cannot be used: shape, dtype, device, size (also a ValueError)
    ├── TopologyError                 who is where cannot be told, or contradicts itself
    ├── CompressorError               settings no compressor can have (also a ValueError)
    ├── NonFiniteError                a tensor to be sent holds NaN, infinity or too large a number
    ├── SyncError                     this rank did its part, but another rank of its node failed; nothing was changed
    ├── WireError                     a received payload is damaged, or not the one expected; nothing was written
    ├── ConfigMismatchError           ranks disagree on what must be equal, or a received header shows that they do
    ├── TorchVersionError             this torch lacks a private name that the library needs
    └── TransportError                a transport, or what was asked of it
        ├── TransportUnavailableError     not installed, no such device, no way to meet the other ranks
        ├── DeadlineExceededError         a collective did not finish in time (also a TimeoutError)
        └── PeerLostError                 another rank is gone (also a ConnectionError)

A backend's own exceptions are translated once, at the transport's edge, and stay attached as ``__cause__``.
"""


class FlexcommError(Exception):
    """Anything this library raises on purpose."""


class InvalidArgumentError(FlexcommError, ValueError):
    """An argument that can mean nothing here: a name nobody has, a number out of range."""


class InvalidTensorError(FlexcommError, ValueError):
    """A tensor does not fit the call: its shape, dtype, device or size."""


class CompressorError(FlexcommError, ValueError):
    """Settings no compressor can have, or a tensor it cannot take; the message lists all that is wrong."""


class NonFiniteError(FlexcommError):
    """A tensor to be sent, or what was kept of it, holds NaN, infinity or a number too large to be summed."""


class WireError(FlexcommError):
    """The payload of ``sender`` is damaged in its ``field``, or is not the one expected; nothing was written."""

    def __init__(self, sender: str, field: str, problem: str) -> None:
        super().__init__(f"the payload of {sender} cannot be used, because of its {field}: {problem}")
        self.sender, self.field = sender, field


class SyncError(FlexcommError):
    """Another rank of this node failed while this one did its part; nothing was changed, and its own error says why."""


class TopologyError(FlexcommError):
    """Rank, size, node or local rank cannot be told, or what the launcher says contradicts itself."""


class ConfigMismatchError(FlexcommError):
    """Ranks disagree on what must be equal: found before data moves, or in a received header. Nothing was written."""


class TorchVersionError(FlexcommError):
    """The installed torch lacks a private name that the library needs; the message says which versions have it."""


class TransportError(FlexcommError):
    """A transport failed, or was asked for something it cannot do."""


class TransportUnavailableError(TransportError):
    """The transport cannot be had here: not installed, no device, or no way to meet the other ranks."""


class DeadlineExceededError(TransportError, TimeoutError):
    """A collective did not finish before its deadline: some rank is slow, stopped, or in another call."""


class PeerLostError(TransportError, ConnectionError):
    """A rank this one was talking to is gone."""
