"""What an application does with the encoded texts: keep them in a folder, search, filter, change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

import late_interaction as li
from demo import show
from demo.corpus import Pair
from demo.encode import Tokens, unpad
from demo.evaluate import TOP, quality

BATCH = 200


def keep(folder: Path, pairs: list[Pair], D: Tokens) -> li.Corpus:
    """Write the documents to a folder as int8 codes, by name, with their modules beside them."""
    tokens = unpad(D.embeddings, D.mask)
    with li.Corpus.create(folder, d=D.embeddings.shape[-1], codec=li.codecs.Int8()) as builder:
        for start in range(0, len(pairs), BATCH):
            names = [pair.name for pair in pairs[start : start + BATCH]]
            modules = {"module": [name.split(".")[0] for name in names]}
            builder.add(tokens[start : start + BATCH], ids=names, columns=modules)
    return li.Corpus.open(folder)


def use(folder: Path, pairs: list[Pair], Q: Tokens, D: Tokens, held_out: Tensor, hit: int) -> None:
    """Search the held-out queries; then filter, delete and add for one query. Print it all."""
    import pyarrow.compute as pc

    corpus = keep(folder, pairs, D)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"   {len(corpus):,} documents, {corpus.tokens:,} tokens: {size / 1e6:.1f} MB, mapped into memory")
    result = corpus.search(li.Tokens(Q.embeddings[held_out], Q.mask[held_out]), TOP)
    found = quality(result.indices, held_out)
    print(f"   held-out queries: MRR@{TOP} {found.mrr:.4f}, recall@{TOP} {found.recall:.4f}\n")

    def best(documents: str, **options: Any) -> tuple[str, str, str]:
        result: Any = corpus.search(Q.embeddings[hit][Q.mask[hit]], 1, **options)
        return documents, str(result.ids[0]), f"{result.scores[0]:.2f}"

    rows = [best("all")]
    name = rows[0][1]
    module = name.split(".")[0]
    rows.append(best(f"outside {module}", filter=pc.field("module") != module))
    tokens = corpus[name]
    corpus.delete([name])
    rows.append(best("the best one deleted"))
    corpus.add([tokens], ids=[name], columns={"module": [module]})
    rows.append(best("and added again"))
    print(f'   "{pairs[hit].query}"\n')
    print(show.table(("documents", "best", "score"), rows, "<<>"))
