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

The modules:

``arguments``       the arguments of a public loss: checked, prepared, and agreed on with the group
``call``            what they become: what one call computes
``labels``          where the labels of rows lie, what their logits take from the loss, and candidates
``sequences``       blocks of the sequences of Tokens
``kernels``         how the operators score and differentiate a block
``blocks``          how large a block is, and which ones are kept for the backward
``forward``         the forward pass over a shard of documents
``backward``        the backward pass over all shards, and where gradients add up
``blockwise``       the autograd function of every loss: both passes
``cross_entropy``   the cross entropy, from running sums of the softmax (``softmax``) and the pairs that a
                    tail leaves (``pair_list``)
``row_losses``      losses of each query from sums over its logits: hardest negative, SigLIP's and recall's
``mixup``           virtual examples of recall's, mixed from scores
``whole``           the losses of a batch that is small enough to keep all scores and winners, or to gather
                    all documents of a process group
``single``          the cross entropy of a batch with one token a side, in ``panels``
``single_shards``   the same over a process group
``ring``            shards of documents that travel round a process group
"""
