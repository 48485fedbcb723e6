"""Contrastive losses over MaxSim scores, a block of queries and documents at a time.

``tokens``        one side of a batch, padded or packed, and its parts
``blocks``        how large a block is, and how it is scored and differentiated by the operators
``products``      matrix products with results in float32
``problem``       what one call computes, as the passes below need it
``forward``       the forward pass over one shard of documents
``backward``      the backward pass over one shard of documents
``sums``          where the gradient of one side adds up
``shards``        the backward over all shards and the reduction over processes, for every loss
``ring``          shards of documents that travel round a process group
``labels``        which logit of a row is its label's
``check``         what the public functions ask of their arguments
``own_options``   options that one loss alone has
``arguments``     the arguments, checked, prepared and agreed on with the group
``module``        what the modules of losses have in common
``cached``        encoding in parts with cached gradients (GradCache), and ``parts``, what it needs

The cross entropy:

``softmax``       running sums of softmax rows and columns, from which loss and weights follow
``tail``          the list of pairs whose softmax weight is not negligible
``reduction``     the loss, its derivatives in rows and columns, and the temperature's gradient
``function``      the autograd function: both passes over all shards
``whole``         the loss of a batch that is small enough to keep all scores and winners
``single``        the loss of a batch with one token a side, and ``panels``, the parts that it passes in

``row_losses``, losses of each query that follow from sums over its logits:

``rows``          what such a loss is: two methods over a panel of logits
``pairwise``      the hardest negative
``sigmoid``       SigLIP's loss over all pairs
``recall``        the surrogate of recall@k
``row_function``  their autograd functions, by blocks and of all scores
"""
