"""Contrastive losses over MaxSim scores, a block of queries and documents at a time.

``tokens``    one side of a batch, padded or packed, and its parts
``blocks``    how large a block is, and how it is scored and differentiated by the operators
``softmax``   running sums of softmax rows and columns, from which loss and weights follow
``problem``   what one call computes, as the passes below need it
``forward``   the forward pass over one shard of documents
``backward``  the backward pass over one shard of documents
``tail``      the list of pairs whose softmax weight is not negligible
``ring``      shards of documents that travel round a process group
``function``  the autograd function: both passes over all shards
``whole``     the loss of a batch that is small enough to keep all scores and winners
``check``     what the public function asks of its arguments
``cached``    encoding in parts with cached gradients (GradCache)
"""
