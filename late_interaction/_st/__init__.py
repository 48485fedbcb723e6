"""What stands behind :mod:`late_interaction.sentence_transformers` and its patch:

``originals``  Sentence Transformers' own functions, for calls that are left to them
``inputs``     its embeddings and masks, as the kernels take them
``chunks``     what the kernels score of a call, and what is left to its own code
``scores``     its scoring functions by name
``weights``    query masks that are no masks but weights
``losses``     its losses over all pairs of a batch, without the matrix of scores
``ranking``    its retrieval evaluator, without the matrix of scores
"""
