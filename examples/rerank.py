"""Reranking: words find candidates, and MaxSim puts the best of them first.

    python examples/rerank.py                      # needs what `make demo` installs

The first stage is tf-idf over 300 docstrings; all-MiniLM-L6-v2, one vector a token, reranks the best 20 of
each query. The program prints how well either ranks the docstring whose first sentence the query is.
"""

from __future__ import annotations

import argparse

import torch
from letters import device, mrr, texts, word_scores

import late_interaction as li


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=300)
    parser.add_argument("--candidates", type=int, default=20)
    args = parser.parse_args()
    from demo.encode import Encoder  # its libraries take a while to import

    queries, documents = (side[: args.documents] for side in texts())
    candidates = word_scores(queries, documents).topk(args.candidates).indices.to(device())  # [queries, K]

    Q, D = Encoder(device()).encode(queries, documents)
    # Each query's own documents: [queries, K, Ld, d], a block of queries at a time.
    blocks = [
        li.maxsim(Q.embeddings[i], D.embeddings[k], Q.mask[i], D.mask[k])
        for i, k in zip(torch.arange(len(queries)).split(32), candidates.split(32), strict=True)
    ]
    order = torch.cat(blocks).argsort(dim=1, descending=True)
    reranked = candidates.gather(1, order)
    print(f"{args.candidates} candidates of {len(documents)} documents for each of {len(queries)} queries")
    print(f"MRR@10 of the candidates: {mrr(candidates):.4f}")
    print(f"MRR@10 reranked by MaxSim: {mrr(reranked):.4f}")


if __name__ == "__main__":
    main()
