"""What the functions of this package ask of their arguments, before any operator runs, by operator.

TypeError: an argument of the wrong kind or dtype. ValueError: a shape, device or value that does not fit.
A message names the argument, what came and what is wanted.
"""
