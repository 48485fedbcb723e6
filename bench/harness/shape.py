"""A problem size, and the least work that the hardware must do for it."""

from dataclasses import dataclass

import torch

IN_BATCH = "in-batch"  # D [Nd, Ld, d]: every query meets every document
KD = "kd"  # D [Nq, K, Ld, d]: each query meets its own K documents; Nd holds K
PAIRS = "pairs"  # D [Nq, Ld, d]: query i meets document i; Nd is 1


@dataclass(frozen=True)
class Shape:
    """One problem size. Nd is the number of documents that each query meets (K for kd, 1 for pairs)."""

    name: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    d: int = 128
    layout: str = IN_BATCH
    compiled: bool = False  # torch.compile takes seconds for a shape: only these are compiled by default

    @property
    def documents(self):
        """Distinct documents in D."""
        return self.Nd if self.layout == IN_BATCH else self.Nq * self.Nd

    @property
    def q_shape(self):
        return (self.Nq, self.Lq, self.d)

    @property
    def d_shape(self):
        if self.layout == KD:
            return (self.Nq, self.Nd, self.Ld, self.d)
        return (self.documents, self.Ld, self.d)

    @property
    def scores_shape(self):
        return (self.Nq,) if self.layout == PAIRS else (self.Nq, self.Nd)

    @property
    def winners_shape(self):
        return (self.Nq, self.Nd, self.Lq)

    @property
    def similarities(self):
        """Elements of the similarity tensor that PyTorch would build."""
        return self.Nq * self.Nd * self.Lq * self.Ld

    @property
    def flops(self):
        """Multiply-adds of the similarities, counted as two operations each."""
        return 2 * self.similarities * self.d

    def input_bytes(self, itemsize):
        return (self.Nq * self.Lq + self.documents * self.Ld) * self.d * itemsize

    def bytes_moved(self, op, itemsize):
        """The fewest bytes of device memory: every input read once, every output written once."""
        tokens = self.input_bytes(itemsize)
        scores = 4 * self.Nq * self.Nd
        if op == "fwd":
            return tokens + scores
        if op == "fwd+bwd":  # scores out, grad_scores in, both gradients out
            return 2 * tokens + 2 * scores
        # Backward alone reads each winning row of D once at most, and the winners in 2 bytes.
        winners = self.Nq * self.Nd * self.Lq
        rows_read = min(winners, self.documents * self.Ld)
        read = (self.Nq * self.Lq + rows_read) * self.d * itemsize + 2 * winners + scores
        return read + tokens

    def arithmetic(self, op):
        """Operations that no implementation avoids. A backward only touches winners."""
        backward = 4 * self.Nq * self.Nd * self.Lq * self.d
        return {"fwd": self.flops, "fwd+bwd": self.flops + backward, "bwd": backward}[op]


@dataclass(frozen=True)
class HiddenShape(Shape):
    """Documents are hidden states [Nd, Ld, d_model], projected to d."""

    d_model: int = 768

    @property
    def hidden_shape(self):
        return (self.Nd, self.Ld, self.d_model)

    @property
    def flops(self):
        return super().flops + 2 * self.Nd * self.Ld * self.d * self.d_model

    def input_bytes(self, itemsize):
        return (self.Nq * self.Lq * self.d + (self.Nd * self.Ld + self.d) * self.d_model) * itemsize


@dataclass(frozen=True)
class PairShape(Shape):
    """Packed queries and documents of up to Lq and Ld tokens, and how many pairs of them are listed."""

    pairs: int = 0
    even: bool = False  # all of Lq and Ld tokens


@dataclass(frozen=True)
class BatchShape(Shape):
    """A batch of Nq queries and as many documents for a contrastive loss."""

    packed: bool = False  # of different lengths, up to Lq and Ld tokens


def itemsize(dtype):
    return torch.empty((), dtype=dtype).element_size()
