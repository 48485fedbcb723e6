"""Panels of weights, of a batch with one token a side, and the gradients that they add up to."""
