"""What the harness asks of a library: how to call its MaxSim, and what its results may differ by."""

from collections.abc import Callable

import torch

# The names of the libraries, as records and tables have them.
OURS = "late_interaction"
LIK = "late-interaction-kernels"
FLASH = "flash-maxsim"
EINSUM = "torch einsum"
COMPILED = "torch.compile"
MAXSIM_CPU = "maxsim-cpu"
NUMKONG = "NumKong"
QDRANT = "qdrant-client"  # local mode
LANCEDB = "LanceDB"  # embedded, a table without an index
INF_CL = "Inf-CL"
SENTENCE_TRANSFORMERS = "Sentence Transformers"  # its XTR scores
GEMM = "torch GEMM"  # the matrix product without the max, on a CPU

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class UnsupportedError(Exception):
    """The implementation has no such call, or the call would not fit in memory; the message says which."""


class Implementation:
    """One library, or one way to write MaxSim in PyTorch."""

    name: str
    backwards: tuple[str | None, ...] = (None,)  # gradient strategies; each is measured
    builds_similarities = False  # allocates [Nq, Nd, Lq, Ld]
    rounds_similarities = False  # to the input dtype, so that another token may win

    def score(self, shape, backward, train):
        """A function (Q, D) -> scores; differentiable if `train`."""
        raise UnsupportedError(f"{self.name} has no such call")

    def backward(self, shape, backward, inputs):
        """A function that computes both gradients from inputs.winners."""
        raise UnsupportedError(f"{self.name} has no backward of its own")

    def winners(self, shape, inputs):
        """Winners [Nq, Nd, Lq], or None from an implementation that does not return them."""
        return None


def training_step(score, leaves, grad):
    """A function that returns the scores and the gradients of the leaves, which the scores are of."""

    def run():
        scores = score(*leaves)
        # Scores that keep their graph would tie the leaves to the stream of this call.
        return (scores.detach(), *torch.autograd.grad(scores, leaves, grad))

    return run
