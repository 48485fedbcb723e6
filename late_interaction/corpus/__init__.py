"""Documents of different lengths, packed end to end, in memory or in a folder on disk: :class:`Corpus`.

A folder is written by :class:`CorpusBuilder` (:meth:`Corpus.create`), mapped into memory by
:meth:`Corpus.open`, and changed by :meth:`Corpus.add`, ``delete``, ``update`` and ``compact``: each writes
new files, and then replaces the metadata at once. Arrow columns and NumPy arrays become a corpus where they
lie. :meth:`Corpus.search` scores chunks of it with the packed operators: no token is padded in storage, and
memory stays bounded.

The folder::

    metadata.json          the newest generation: format, dtype, d, bytes and checksums of files
    codec.*                centroids, bucket_cutoffs and bucket_weights, where tokens are residuals
    shard-00000.tokens     [tokens, d] of the first shard, end to end; of residuals [tokens, bytes]
    shard-00000.offsets    [documents + 1] int64: where each document begins among the shard's tokens
    shard-00000.scales     [tokens] float32, where tokens are codes
    shard-00000.codes      [tokens] int32, the centroid of each residual
    shard-00000.ids        the ids of the documents in UTF-8, end to end, and
    shard-00000.id_offsets [documents + 1] int64: where each id begins, where documents have ids
    shard-00000.columns    an Arrow IPC file with a row for each document, where documents have columns
    shard-00000.bits       what a first pass has made of the shard, as .muvera, .muvera_unit and .lists
    ...
    deleted-00007          int64: the documents that generation 7 deleted, numbered as they were written

Numbers are little-endian.
"""

from late_interaction.corpus.builder import CorpusBuilder
from late_interaction.corpus.corpus import Corpus, CorpusError

__all__ = ["Corpus", "CorpusBuilder", "CorpusError"]
