"""The strings that options take, for type checkers and for messages."""

from typing import Literal, get_args

Backward = Literal["auto", "unified", "lowmem"]
MultiPositive = Literal["mean", "softmax"]
Precision = Literal["highest", "high", "medium"]
Reduction = Literal["mean", "sum", "none"]
Rule = Literal["paper", "pylate"]  # of xtr_scores
Winners = Literal["save", "recompute"]
BACKWARDS: tuple[Backward, ...] = get_args(Backward)
MULTI_POSITIVES: tuple[MultiPositive, ...] = get_args(MultiPositive)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
RULES: tuple[Rule, ...] = get_args(Rule)
WINNERS: tuple[Winners, ...] = get_args(Winners)
