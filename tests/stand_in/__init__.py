"""A stand-in accelerator: a device type of torch, ``standin``, that runs on the host and checks what a device asks.

Its memory is the host's, and its work is done at once, but streams, events, the caching allocator, pinned memory and
the collectives of a backend that behaves as NCCL does are told in what order a device would have to work. What would
be a race, a use after free or a hang on a device is reported, with the Python stacks of both accesses. See
``tests/stand_in/laws.py`` for how laws are held on it.
"""
