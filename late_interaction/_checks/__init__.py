"""Checks of arguments, by operator: public functions make them before any operator runs.

TypeError: an argument of the wrong kind or dtype. ValueError: a shape, device or value that does not fit.
A message names the argument, what came and what is wanted.
"""
