"""Which of the documents that a search found become a query's negatives."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import check_integer, check_positive, check_seed, is_one_of
from late_interaction.ops.topk import MOST_DOCUMENTS

Strategy = Literal["top", "random"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
# Candidates for each negative where scores or margins may refuse some.
_SPARE = 10
_MOST = 1 << 62  # of a score


@dataclass(frozen=True)
class Choice:
    """The options of :func:`late_interaction.hard_negatives` that say what may be a negative."""

    num_negatives: int = 3
    range_min: int = 0
    range_max: int | None = None
    max_score: float | None = None
    min_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    sampling_strategy: Strategy = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive("num_negatives", self.num_negatives)
        if self.num_negatives > MOST_DOCUMENTS:
            raise ValueError(f"num_negatives must be at most 2**32, got {abbreviate(self.num_negatives)}")
        check_integer("range_min", self.range_min)
        if self.range_min < 0:
            raise ValueError(f"range_min must be at least 0, got {self.range_min}")
        if self.range_max is not None:
            check_positive("range_max", self.range_max)
        if not is_one_of(self.sampling_strategy, STRATEGIES):
            raise ValueError(
                f"sampling_strategy must be one of {STRATEGIES}, got {abbreviate(self.sampling_strategy)}"
            )
        if self.most - self.range_min < self.num_negatives:
            raise ValueError(
                f"range_max must leave room for {self.num_negatives} negatives from rank {self.range_min} on,"
                f" got {self.range_max}"
            )
        for name in ("max_score", "min_score", "absolute_margin", "relative_margin"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise TypeError(f"{name} must be a number or None, got {abbreviate(value)}")
            if isinstance(value, int) and abs(value) > _MOST:
                raise ValueError(f"{name} must lie in [-2**62, 2**62], got {abbreviate(value)}")
        check_seed(self.seed)

    @property
    def most(self) -> int:
        """Return the rank among a query's negatives from which on none is taken."""
        if self.range_max is not None:
            return self.range_max
        filters = self.max_score, self.absolute_margin, self.relative_margin
        spare = 1 if all(x is None for x in filters) and self.sampling_strategy == "top" else _SPARE
        return self.range_min + spare * self.num_negatives

    def columns(self, scores: Tensor, is_positive: Tensor, positive: Tensor) -> Tensor:
        """Choose the columns of ``scores [Nq, n]`` that become negatives: ``[Nq, num_negatives]``.

        They are best first, in the order of their ranks; ``n`` where there are no more. positive: ``[Nq]``,
        each query's lowest score of a positive, NaN where it has none.
        """
        rank = (~is_positive).cumsum(1) - 1
        fit = ~is_positive & (rank < min(self.most, scores.shape[1])) & ~scores.isnan()
        if self.max_score is not None:
            fit &= scores <= self.max_score
        if self.min_score is not None:
            fit &= scores >= self.min_score
        limit = positive.unsqueeze(1)
        if self.absolute_margin is not None:
            fit &= (scores <= limit - self.absolute_margin) | limit.isnan()
        if self.relative_margin is not None:
            fit &= (scores <= limit - self.relative_margin * limit.abs()) | limit.isnan()
        return self._chosen(fit & (fit.cumsum(1) > min(self.range_min, scores.shape[1])))

    def _chosen(self, fit: Tensor) -> Tensor:
        n = fit.shape[1]
        places = torch.arange(n, device=fit.device).expand(fit.shape)
        key = places.double()
        if self.sampling_strategy == "random":  # drawn on the CPU, so that all devices choose the same
            generator = torch.Generator(device="cpu").manual_seed(int(self.seed))
            key = torch.rand(fit.shape, generator=generator, dtype=torch.float64, device="cpu").to(fit.device)
        key = key.masked_fill(~fit, torch.inf)
        chosen = key.argsort(dim=1, stable=True)[:, : self.num_negatives]
        found = torch.where(fit.gather(1, chosen), chosen, n).sort(dim=1).values
        return torch.nn.functional.pad(found, (0, self.num_negatives - found.shape[1]), value=n)
