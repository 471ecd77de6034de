"""``python -m bench gpu``: a report of the first machine with GPUs; ``gpu count``: kernels counted, without one."""
