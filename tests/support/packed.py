"""Packed queries and documents for tests, and the judge of their scores and gradients."""

import itertools

import torch

import late_interaction as li
from tests.support import ref

# Lengths of queries and documents: what each is there for.
LENGTHS = {
    "one of each": ([5], [7]),
    "short and empty": ([3, 0, 5, 1, 0], [7, 0, 2, 30, 1]),
    "one query, many documents": ([32], [1, 64, 65, 300, 0, 129, 20, 512, 63, 2, 128, 17] * 9),
    "several short queries": ([32, 1, 31, 9, 0, 20], [70, 0, 1, 300, 128, 65]),
    "rows past a tile": ([33, 257, 0, 1, 64, 31, 300], [80, 104, 1, 0, 152, 153, 700, 33]),
    "warps shared by queries": ([1] * 40 + [0] * 3 + [7] * 40, [19, 176, 3, 2000, 81]),
    "many rows, short documents": ([20] * 9, [17, 24, 0, 1, 8, 30, 9] * 5),
    "many rows, short documents and a long one": ([33, 0, 150], [5, 0, 9] * 9 + [300] + [7] * 20),
    "many rows, documents of a few tokens": ([150, 3], [1, 2, 0, 8] * 11),
    "long query": ([1030, 2], [1030, 5, 127]),
    "only empty documents": ([4, 9], [0, 0]),
    "only empty queries": ([0, 0], [5, 6]),
    "no query": ([], [3]),
    "no document": ([3], []),
}
DIMS = [128, 8, 64, 40, 7, 200, 96, 1024]


def offsets(lengths, stray=0):
    """cu_seqlens; with `stray` tokens before the first sequence that belong to none."""
    return torch.tensor([stray, *lengths]).cumsum(0).to(torch.int32)


def pack(lengths, d, dtype, device="cpu", stray=0):
    tokens = torch.randn(sum(lengths) + 2 * stray, d, device=device).to(dtype)
    return tokens, offsets(lengths, stray).to(device)


def pack_sequences(sequences):
    """(tokens, offsets) of a list."""
    packed = li.Tokens.from_list(sequences)
    return packed.values, packed.offsets


def scored(Q, D, cu_q, cu_d, q_weights=None, **options):
    """maxsim of packed sequences, without the tokens that belong to none."""
    q, d = (slice(int(cu[0]), int(cu[-1])) for cu in (cu_q, cu_d))
    q_weights = None if q_weights is None else q_weights[q]
    sides = li.Tokens.packed(Q[q], cu_q - cu_q[0]), li.Tokens.packed(D[d], cu_d - cu_d[0])
    return li.maxsim(*sides, q_weights=q_weights, **options)


def widened(winners, tokens):
    """As int32: of at most 65534 tokens, winners from 32768 on are negative numbers of 16 bits."""
    return torch.where(winners < -1, winners.int() + 65536, winners.int()) if tokens <= 65534 else winners


def slices(tokens, cu):
    cu = cu.tolist()
    return [tokens[begin:end] for begin, end in itertools.pairwise(cu)]


def scores_and_winners(Q, D, cu_q, cu_d):
    """([Nq, Nd] float64, [Nd, tokens of Q] int64), document by document."""
    documents, lengths = slices(D, cu_d), cu_q.to(Q.device).diff()
    rows = slice(int(cu_q[0]), int(cu_q[-1]))
    query_of = torch.arange(len(lengths), device=Q.device).repeat_interleave(lengths)
    scores = torch.zeros(len(lengths), len(documents), dtype=torch.float64, device=Q.device)
    winners = torch.full((len(documents), len(Q)), -1, device=Q.device)
    for j, d in enumerate(documents):
        if len(d):
            maxima, winners[j, rows] = (Q[rows].double() @ d.double().T).max(1)
            scores[:, j].index_add_(0, query_of, maxima)
    return scores, winners


def draw_pairs(queries, documents, count, device="cpu"):
    """Some that repeat, and no order."""
    if queries == 0 or documents == 0:
        count = 0
    pair_q = torch.randint(max(queries, 1), (count,), dtype=torch.int32)
    pair_d = torch.randint(max(documents, 1), (count,), dtype=torch.int32)
    return pair_q.to(device), pair_d.to(device)


def judged_pairs(Q, D, cu_q, cu_d, pair_q, pair_d, stride):
    """([pairs] float64, [pairs, stride] with -1 behind a query's end), pair by pair."""
    queries, documents = slices(Q, cu_q), slices(D, cu_d)
    scores = torch.zeros(len(pair_q), dtype=torch.float64, device=Q.device)
    winners = torch.full((len(pair_q), stride), -1, device=Q.device)
    for p, (i, j) in enumerate(zip(pair_q.tolist(), pair_d.tolist(), strict=True)):
        score, winner = ref.maxsim(queries[i][None], documents[j][None])
        scores[p], winners[p, : len(queries[i])] = score[0, 0], winner[0, 0]
    return scores, winners


def gradients(grad_scores, Q, D, cu_q, cu_d, winners):
    """(grad_Q, grad_D) in float64, with the winners as given."""
    grad_Q = torch.zeros(Q.shape, dtype=torch.float64, device=Q.device)
    grad_D = torch.zeros(D.shape, dtype=torch.float64, device=Q.device)
    q, d, lengths, first = Q.double(), D.double(), cu_q.to(Q.device).diff(), int(cu_q[0])
    query_of = torch.arange(len(lengths), device=Q.device).repeat_interleave(lengths)
    for j, begin in enumerate(cu_d.tolist()[:-1]):
        found = winners[j, first : first + len(query_of)].long()
        (row,) = (found >= 0).nonzero(as_tuple=True)
        weight = grad_scores[query_of[row], j].double().unsqueeze(-1)
        grad_Q.index_add_(0, first + row, weight * d[begin + found[row]])
        grad_D.index_add_(0, begin + found[row], weight * q[first + row])
    return grad_Q, grad_D


def gradients_of_pairs(grad_scores, Q, D, cu_q, cu_d, pair_q, pair_d, winners):
    """(grad_Q, grad_D) in float64, with the winners as given."""
    grad_Q = torch.zeros(Q.shape, dtype=torch.float64, device=Q.device)
    grad_D = torch.zeros(D.shape, dtype=torch.float64, device=Q.device)
    for p, (i, j) in enumerate(zip(pair_q.tolist(), pair_d.tolist(), strict=True)):
        rows = slice(int(cu_q[i]), int(cu_q[i + 1]))
        found = winners[p, : rows.stop - rows.start].long()
        if not bool((found >= 0).any()):
            continue
        tokens = int(cu_d[j]) + found.clamp_min(0)
        weight = grad_scores[p].double() * (found >= 0).unsqueeze(-1)
        grad_Q[rows] += weight * D[tokens].double()
        grad_D.index_add_(0, tokens, weight * Q[rows].double())
    return grad_Q, grad_D
