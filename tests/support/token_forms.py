"""Sequences in every form that functions take them in, and the scores that they have, for tests."""

import random

import torch

from late_interaction import Tokens

D_MODEL = 24
LENGTHS = {
    "nasty": ([0, 1, 7, 13, 64, 65, 33], [65, 0, 1, 31, 64, 129, 5]),
    "one of each": ([3], [5]),
    "only empty queries": ([0, 0], [5, 6]),
    "only empty documents": ([4, 9], [0, 0]),
    "single tokens": ([1, 1, 1], [1, 1, 1]),
}


def sequences(lengths, device="cpu", dtype=torch.float64, d=D_MODEL):
    return [torch.randn(n, d, device=device).to(dtype) for n in lengths]


def padded(xs):
    """Padded at the end. What is masked is NaN."""
    tokens = Tokens.from_list(xs).to_padded()
    return Tokens(tokens.values.masked_fill(~tokens.mask[..., None], float("nan")), tokens.mask)


def with_holes(xs):
    """Padded between its tokens, too. What is masked is NaN."""
    longest = max(map(len, xs)) + 3
    order = random.Random(0)
    mask = torch.zeros(len(xs), longest, dtype=torch.bool, device=xs[0].device)
    values = xs[0].new_full((len(xs), longest, xs[0].shape[1]), float("nan"))
    for i, x in enumerate(xs):
        at = torch.tensor(sorted(order.sample(range(longest), len(x))), dtype=torch.long, device=x.device)
        mask[i] = mask[i].index_fill(0, at, True)
        values = values.index_put((torch.tensor(i, device=x.device), at), x)
    return Tokens(values, mask)


def nested(xs):
    return Tokens.from_nested(torch.nested.as_nested_tensor(xs, layout=torch.jagged))


FORMS = {
    "list": list,
    "packed": Tokens.from_list,
    "packed on its own": lambda xs: Tokens.packed(torch.cat(xs), Tokens.from_list(xs).offsets.long()),
    "padded": padded,
    "holes": with_holes,
    "nested": nested,
}
# Each form on either side, and each kind with each.
PAIRS = [
    *zip(FORMS, [*FORMS][1:], strict=False),
    ("nested", "list"),
    ("holes", "holes"),
    ("padded", "packed"),
]


def expected(queries, documents, weights=None):
    """[Nq, Nd] by the reference, a pair at a time."""
    rows = []
    for i, q in enumerate(queries):
        weight = 1.0 if weights is None else weights[i]
        row = []
        for d in documents:
            if len(q) and len(d):
                row.append(((q @ d.T).amax(1) * weight).sum())
            else:
                row.append((q.sum() + d.sum()) * 0)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def leaves(xs):
    return [x.clone().requires_grad_() for x in xs]


def gradients(scores, xs):
    weight = torch.linspace(-1.0, 2.0, max(scores.numel(), 1), dtype=scores.dtype, device=scores.device)
    (scores.flatten() * weight[: scores.numel()]).sum().backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]


def assert_scores_and_gradients(function, want, queries, documents, first, second):
    """``function`` of one form of queries and another of documents gives what ``want`` gives of lists."""
    own, theirs = leaves(queries + documents), leaves(queries + documents)
    n = len(queries)
    got = function(FORMS[first](own[:n]), FORMS[second](own[n:]))
    right = want(theirs[:n], theirs[n:])
    torch.testing.assert_close(got, right)
    if got.requires_grad:
        torch.testing.assert_close(gradients(got, own), gradients(right, theirs))
