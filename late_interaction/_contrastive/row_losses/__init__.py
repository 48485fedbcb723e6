"""Losses of each query that follow from sums over its logits."""
