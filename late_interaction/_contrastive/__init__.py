"""Losses over all pairs of a batch of MaxSim scores, a block of queries and documents at a time.

``arguments``       the arguments of a public loss: checked, prepared, and agreed on with the group
``call``            what they become: what one call computes
``labels``          which logits of a row are its labels', and what they take from the loss
``candidates``      which documents a query is compared with
``sequences``       parts and blocks of Tokens
``kernels``         how the operators score and differentiate a block, and ``blocks``, how large one is
``forward``         the forward pass over a shard of documents, and ``kept_blocks``, what stays of it
``backward``        the backward pass over all shards, and ``gradient_sums``, where gradients add up
``blockwise``       the autograd function of every loss: both passes
``cross_entropy``   the cross entropy, from running sums of the softmax (``softmax``) and the pairs that a
                    tail leaves (``pair_list``)
``row_losses``      losses of each query that follow from sums over its logits
``mixed_recall``    that of recall with virtual examples, which ``mixup`` mixes from scores
``whole``           the losses of a batch that is small enough to keep all scores and winners
``single``          the cross entropy of a batch with one token a side, in ``panels`` or ``product_panels``
``ring``            shards of documents that travel round a process group, and ``gather``, small ones at once
"""
