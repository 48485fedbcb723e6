"""The libraries that are measured, each called as its documentation says. All but PyTorch are optional."""

import importlib

import torch

from bench.harness.library import COMPILED, EINSUM, FLASH, LIK, OURS, Implementation
from bench.harness.shape import IN_BATCH, KD, PAIRS


class _Strategies(Implementation):
    """A package whose `maxsim` and `maxsim_pairs` take a gradient strategy."""

    package: str

    def __init__(self):
        self.lib = importlib.import_module(self.package)

    def score(self, shape, backward, train):
        f = self.lib.maxsim_pairs if shape.layout == PAIRS else self.lib.maxsim
        if not train:
            return lambda Q, D: f(Q, D)
        return lambda Q, D: f(Q, D, backward=backward)


class Ours(_Strategies):
    name, package = OURS, "late_interaction"
    backwards = ("auto", "lowmem", "unified")

    def backward(self, shape, backward, inputs):
        op = torch.ops.late_interaction.maxsim_backward
        narrow = shape.Ld <= 65534  # winners are stored as unsigned 16-bit indices, in an int16 tensor
        winners = inputs.winners.to(torch.int16 if narrow else torch.int32).contiguous()
        D = inputs.D.unsqueeze(1) if shape.layout == PAIRS else inputs.D
        grad_scores = inputs.grad_scores.view(shape.Nq, shape.Nd)

        def run():
            grad_Q, grad_D = op(grad_scores, inputs.Q, D, winners, False, backward or "auto", True, True)
            return grad_Q, grad_D

        return run

    def winners(self, shape, inputs):
        D = inputs.D.unsqueeze(1) if shape.layout == PAIRS else inputs.D
        return self.lib.maxsim_with_winners(inputs.Q.detach(), D.detach())[1]


class Lik(_Strategies):
    """late-interaction-kernels. Its "auto" chooses one of the two strategies, which are both measured."""

    name, package = LIK, "late_interaction_kernels"
    backwards = ("lowmem", "unified")
    chunk = 128  # query tokens of a launch: its maxsim splits queries of more than 512 tokens

    def backward(self, shape, backward, inputs):
        f = getattr(
            importlib.import_module("late_interaction_kernels.backward"), f"maxsim_backward_{backward}"
        )
        Nq, Nd, Lq, d = shape.Nq, shape.Nd, shape.Lq, shape.d
        Q = inputs.Q
        D = inputs.D.reshape(-1, shape.Ld, d)
        winners = inputs.winners
        grad_scores = inputs.grad_scores.view(Nq, Nd)
        q_mask = None
        bucket = max(16, 1 << (Lq - 1).bit_length()) if Lq <= 512 else -(-Lq // self.chunk) * self.chunk
        if bucket != Lq:  # pads like its own forward
            pad = bucket - Lq
            Q = torch.nn.functional.pad(Q, (0, 0, 0, pad))
            winners = torch.nn.functional.pad(winners, (0, pad), value=-1)
            q_mask = torch.ones(Nq, bucket, dtype=torch.int8, device=Q.device)
            q_mask[:, Lq:] = 0
        if Lq > 512:  # one "query" per chunk
            n = bucket // self.chunk
            Q = Q.reshape(Nq * n, self.chunk, d)
            winners = winners.view(Nq, Nd, n, self.chunk).transpose(1, 2)
            grad_scores = grad_scores.repeat_interleave(n, 0)
            q_mask = q_mask.view(Nq * n, self.chunk) if q_mask is not None else None
        argmax = winners.reshape(-1, Q.shape[1]).contiguous()
        kd = shape.layout != IN_BATCH

        def run():
            grad_Q, grad_D = f(grad_scores, Q, D, argmax, q_mask, kd_layout=kd)
            return grad_Q.view(Nq, -1, d)[:, :Lq], grad_D

        return run


class Flash(Implementation):
    """flash-maxsim. Its training call takes [Nq, K, Ld, d] for KD; pairs are K = 1."""

    name = FLASH

    def __init__(self):
        self.lib = importlib.import_module("flash_maxsim")

    def score(self, shape, backward, train):
        lib = self.lib
        if train:
            f = lib.flash_maxsim_batched_train
            if shape.layout == PAIRS:
                return lambda Q, D: f(Q, D.unsqueeze(1), shared_docs=False).squeeze(1)
            return lambda Q, D: f(Q, D, shared_docs=shape.layout == IN_BATCH)
        if shape.layout == PAIRS:
            return lambda Q, D: lib.flash_maxsim_pairs(Q, D)
        if shape.layout == IN_BATCH and shape.Nq == 1:
            return lambda Q, D: lib.flash_maxsim(Q[0], D).unsqueeze(0)
        if shape.layout == IN_BATCH:
            return lambda Q, D: lib.flash_maxsim_batched(Q, D, shared_docs=True)
        # 0.3.0 also splits long queries that have their own documents, and then fails.
        return lambda Q, D: lib.flash_maxsim_batched(Q, D, shared_docs=False, query_chunk_size=None)


def similarity_einsum(layout):
    return {IN_BATCH: "isd,jtd->ijst", KD: "isd,ijtd->ijst", PAIRS: "isd,itd->ist"}[layout]


def einsum_maxsim(Q, D, layout):
    """MaxSim as PyTorch users write it."""
    return torch.einsum(similarity_einsum(layout), Q, D).max(-1).values.float().sum(-1)


class Einsum(Implementation):
    name = EINSUM
    builds_similarities = rounds_similarities = True

    def score(self, shape, backward, train):
        return lambda Q, D: einsum_maxsim(Q, D, shape.layout)


class Compiled(Implementation):
    name = COMPILED
    builds_similarities = rounds_similarities = True

    def score(self, shape, backward, train):
        torch.compiler.reset()
        f = torch.compile(einsum_maxsim, dynamic=False, fullgraph=True)
        return lambda Q, D: f(Q, D, shape.layout)


# What --impl takes.
KEYS = {"ours": Ours, "lik": Lik, "flash": Flash, "einsum": Einsum, "compile": Compiled}


def load(keys, device):
    """The implementations named by `keys` (all, if none), and why others are not available here."""
    found = []
    missing = {}
    for key, cls in KEYS.items():
        if keys and key not in keys:
            continue
        if device.type != "cuda" and cls in (Lik, Flash):
            missing[cls.name] = "runs on CUDA alone"
            continue
        try:
            found.append(cls())
        except Exception as error:  # a broken peer must not stop the others
            missing[cls.name] = f"{type(error).__name__}: {error}"
    return found, missing
