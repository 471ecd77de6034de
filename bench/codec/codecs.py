"""The two codecs that ``bench codec`` compares: our bucket, and the published sequence of torch operations."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexcomm import Compressor, NonFiniteError, TensorSpec, demo
from flexcomm.codec import Decoder, Encoder, plan_buffer
from flexcomm.kernels import Average, StateUpdate, choose_kernels

CHUNK = 64
DECAY = 0.999


class FlexcommCodec:
    """A bucket of one tensor, with its momentum updated in place; checks, header and checksum included."""

    def __init__(self, shape: tuple[int, ...], compressor: Compressor, decay: float = DECAY) -> None:
        self.plan = plan_buffer((TensorSpec("x", shape, torch.float32),), compressor)
        self.kernels = choose_kernels(torch.device("cpu"))
        # Filled, not zeros: fresh zeros are pages the machine has yet to find.
        self.state = torch.empty(self.plan.plans[0].state_shape).fill_(0.0)
        buffer = torch.empty(self.plan.nbytes, dtype=torch.uint8).fill_(0)
        self.encoder = Encoder(self.plan, buffer, self.kernels)
        self.update = StateUpdate(decay)

    def encode_(self, gradient: Tensor) -> Tensor:
        """Update the momentum, move the sent part out of it, and return that part as bytes."""
        problem = self.encoder.encode_([gradient], [self.state], [self.state], self.update, step=0, sequence=0)
        if problem:
            raise NonFiniteError(problem)
        return self.encoder.buffer[: self.encoder.nbytes]

    def decode_(self, out: Tensor, gathered: Tensor, nodes: int, average: Average = "contributors") -> None:
        """Fill ``out`` with the average of the buffers of all nodes, which are of equal length."""
        senders, nbytes = [f"node {node}" for node in range(nodes)], [gathered.numel() // nodes] * nodes
        decoder = Decoder(self.plan, gathered, senders, self.kernels, nbytes)
        decoder.verify(step=0, sequence=0)
        decoder.decode_([out], step=0, average=average)


class Sent(NamedTuple):
    """Payload of the published code: an int64 index and a float32 for every coefficient, ``[chunks, k]``."""

    indices: Tensor
    values: Tensor


class PublishedCodec:
    """DeMo's step as its authors published it (bloc97/DeMo, ``demo.py``): whole tensors, one operation after another.

    Only for lengths that are multiples of the chunk. The learning rate is left out, as it is on our side.
    """

    def __init__(self, shape: tuple[int, ...], k: int) -> None:
        self.k = k
        self.shape = shape
        self.basis = dct_basis(CHUNK)
        self.delta = torch.empty(shape).fill_(0.0)
        self.flat = len(shape) == 1

    def encode_(self, gradient: Tensor) -> Sent:
        """Update the momentum, move the sent part out of it, and return that part."""
        self.delta.mul_(DECAY).add_(gradient)
        coefficients = self._transform(self.delta)
        indices = coefficients.abs().topk(self.k, dim=-1, sorted=False).indices
        sent = Sent(indices, coefficients.gather(-1, indices))
        self.delta.sub_(self._restore(sent))
        return sent

    def decode(self, gathered: Sequence[Sent]) -> Tensor:
        """Return the average over the nodes that sent a coefficient."""
        indices = torch.cat([sent.indices for sent in gathered], dim=-1)
        return self._restore(Sent(indices, torch.cat([sent.values for sent in gathered], dim=-1)))

    def _transform(self, x: Tensor) -> Tensor:
        if self.flat:
            return torch.einsum("ni,ib->nb", x.view(-1, CHUNK), self.basis)
        blocks = x.view(self.shape[0] // CHUNK, CHUNK, self.shape[1] // CHUNK, CHUNK)
        return torch.einsum("yixj,ib,jd->yxbd", blocks, self.basis, self.basis).reshape(-1, CHUNK * CHUNK)

    def _restore(self, sent: Sent) -> Tensor:
        chunk_numel = CHUNK if self.flat else CHUNK * CHUNK
        grid = torch.zeros(sent.indices.shape[0], chunk_numel)
        grid.scatter_reduce_(-1, sent.indices, sent.values, reduce="mean", include_self=False)
        if self.flat:
            return torch.einsum("nb,ib->ni", grid, self.basis).reshape(self.shape)
        blocks = grid.view(self.shape[0] // CHUNK, self.shape[1] // CHUNK, CHUNK, CHUNK)
        return torch.einsum("yxbd,ib,jd->yixj", blocks, self.basis, self.basis).reshape(self.shape)


def dct_basis(length: int) -> Tensor:
    """Return the orthonormal DCT-II as a matrix ``[position, frequency]``."""
    position, frequency = torch.arange(length).unsqueeze(1) + 0.5, torch.arange(length)
    basis = torch.cos(math.pi / length * position.double() * frequency) * math.sqrt(2 / length)
    basis[:, 0] = math.sqrt(1 / length)
    return basis.float()


def find_agreement(gradient: Tensor, k: int) -> float:
    """Return the share of coefficients that both send in a first step; the rest are near ties."""
    shape = tuple(gradient.shape)
    ours, theirs = FlexcommCodec(shape, demo(k, CHUNK, values="fp32")), PublishedCodec(shape, k)
    ours.encode_(gradient)
    sent = theirs.encode_(gradient)
    # Sent as float32, nothing of a coefficient stays behind; the momentum was zero before.
    ours_chose = ours.state == 0
    they_chose = torch.zeros_like(ours_chose).scatter_(1, sent.indices, True)
    if not theirs.flat:
        # Our chunks are kept turned: [frequency along a row, frequency down a column].
        they_chose = they_chose.view(-1, CHUNK, CHUNK).transpose(1, 2).reshape(ours_chose.shape)
    return float((ours_chose & they_chose).sum() / they_chose.sum())
