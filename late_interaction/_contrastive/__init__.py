"""Losses over all pairs of a batch of MaxSim scores, a block of queries and documents at a time.

The words of this folder, each with one meaning:

row, column     a query and a document in the matrix of logits, which are scores divided by the temperature
label           a document that belongs to a query; a row without one is left out
candidate       a document that a query is compared with; the logits of others are minus infinity
hard negatives  documents that only their own query meets (``own_scores``, ``score_own``)
block           consecutive queries, or documents, or both: one call of an operator scores it
panel           the logits of a block of queries with a run of blocks of documents, a loss's unit; with one
                token a side, the scores of a block of queries with all documents
shard, step     the documents of one process; in a step of the ring a process has one of them
sums            what a loss keeps of the logits that passed, or gradients of one side that add up
weights         the gradient of a loss with respect to scores; a softmax weight is exp(logit - log-sum-exp)
listed pairs    those whose weight is not negligible, if the backward takes these alone
winners         for each query token the document token of the greatest similarity

``arguments`` makes a ``call`` of a public loss's arguments. It goes one of these ways: ``whole``, if all
scores and winners of the batch are kept; ``single`` or ``single_shards``, with one token a side; else
``blockwise``, by ``forward`` and ``backward``, with the sums of ``cross_entropy`` or of ``row_losses``.
"""
