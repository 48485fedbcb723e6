"""What stands behind :mod:`late_interaction.sentence_transformers` and its patch:

``originals``   Sentence Transformers' own functions, for calls that are left to them
``inputs``      its embeddings and masks, as the kernels take them
``chunks``      what the kernels score of a call, and what is left to its own code
``weights``     query masks that are no masks but weights
``similarity``  its scoring functions, by name: of embeddings
``colbert``     likewise: of a loss's groups of documents
``xtr``         likewise, by XTR's rule
``losses``      its losses over all pairs of a batch, without the matrix of scores
``ranking``     its retrieval evaluator, without the matrix of scores
"""
