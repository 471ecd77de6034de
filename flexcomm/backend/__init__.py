"""``flexcomm`` as a backend of ``torch.distributed``: all-reduces of gradients between nodes travel compressed.

Importing flexcomm registers it: name it for the axis between nodes of a mesh (``backend_override``), for a group, or
for the whole job, and FSDP2, FSDP1, DDP and any optimizer of torch's go on as they were.
"""

from __future__ import annotations

import torch.distributed as dist

from flexcomm.backend.group import create_group
from flexcomm.backend.options import NAME
from flexcomm.device import KINDS

if NAME not in dist.Backend.backend_list:  # else this module was imported anew
    dist.Backend.register_backend(NAME, create_group, extended_api=True, devices=list(KINDS))
