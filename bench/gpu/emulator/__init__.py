"""Compiled kernels run on the host, instruction by instruction: what they compute, and what that costs."""
