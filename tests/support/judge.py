"""A forward call beside its scores and winners in float64."""

import torch

import late_interaction as li
from tests.support import ref
from tests.support.cases import call


class Judge:
    """The scores and winners of one call in float64, with which those of any plan or option are compared."""

    def __init__(self, Q, D, q_mask=None, d_mask=None, *, normalize=False, case=None):
        self.inputs, self.normalize, self.case = (Q, D, q_mask, d_mask), normalize, case
        self.scores, self.winners = ref.maxsim(Q, D, q_mask, d_mask, normalize)

    def run(self, **options):
        """Return scores alone, scores beside winners, and winners."""
        if self.case is None:
            options["normalize"] = self.normalize
            return li.maxsim(*self.inputs, **options), *li.maxsim_with_winners(*self.inputs, **options)
        alone = call(li.maxsim, self.case, *self.inputs, **options)
        return alone, *call(li.maxsim_with_winners, self.case, *self.inputs, **options)

    def check(self, limit=None, apart=None, what="", same=False, **options):
        """Compare with float64 to these limits. same: scores beside winners have the bits of scores alone."""
        Q, D = self.inputs[:2]
        limit = limit or ref.tolerance(Q.dtype)
        alone, scores, winners = self.run(**options)
        ref.assert_close(alone, self.scores, limit, f"{what} scores")
        ref.assert_close(scores, self.scores, limit, f"{what} scores beside winners")
        ref.assert_winners_close(winners, self.winners, Q, D, apart or limit, self.normalize)
        assert not same or torch.equal(alone, scores), what
        return scores, winners

    def check_exact(self, what="", **options):
        """For whole numbers, whose sums are exact and whose ties are real."""
        alone, scores, winners = self.run(**options)
        assert torch.equal(scores.double(), self.scores) and torch.equal(winners.long(), self.winners), what
        assert torch.equal(alone, scores), what

    def check_not_finite(self, limit=None, what="", **options):
        """Where scores are not finite, so are these, and a maximum that is not is of the first such token."""
        limit = limit or ref.tolerance(self.inputs[0].dtype)
        alone, scores, winners = self.run(**options)
        ref.assert_close(alone, self.scores, limit, f"{what} scores")
        ref.assert_close(scores, self.scores, limit, f"{what} scores beside winners")
        for j, similarities in ref.similarities(*self.inputs[:2], self.normalize):
            wanted = self.winners[:, j]
            best = similarities.gather(-1, wanted.clamp_min(0).unsqueeze(-1)).squeeze(-1)
            settled = (wanted >= 0) & ~best.isfinite()
            assert torch.equal(winners[:, j].long()[settled], wanted[settled]), what


def whole_numbers(low, high, *size, device="cuda"):
    """Small enough that products and sums of them are exact in every dtype and order."""
    return torch.randint(low, high + 1, size, device=device).float()


def twice(D):
    """D, the second half of each document a copy of the first: every token ties with another."""
    Ld = D.shape[-2]
    D[..., Ld // 2 :, :] = D[..., : Ld - Ld // 2, :].clone()
    return D
