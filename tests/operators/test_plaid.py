"""Scores, winners and gradients of residual-compressed documents against float64 brute force."""

import dataclasses
import itertools
import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from late_interaction import codecs, reference
from late_interaction.lik import plaid
from late_interaction.ops.winners import widen
from tests.support import ref
from tests.support.calls import in_graph, waiting_for_nothing
from tests.support.cases import begun

OPS = torch.ops.late_interaction
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


residual = partial(plaid.maxsim_residual, normalize=False)
residual_varlen = partial(plaid.maxsim_residual_varlen, normalize=False)


@dataclass(frozen=True)
class Case:
    Nq: int
    Lq: int
    Nd: int
    Ld: int
    d: int
    nbits: int
    dtype: torch.dtype
    normalize: bool

    def __str__(self):
        sizes = "-".join(map(str, dataclasses.astuple(self)[:6]))
        return f"{sizes}-{str(self.dtype)[6:]}{'-normalize' if self.normalize else ''}"


def walk(count):
    """Each dimension's values in turns of their own, so that all of them meet many of the others."""
    pick = random.Random(0)
    values = {
        "Nq": (1, 2, 1, 5),
        "Lq": (32, 1, 33, 5, 64, 7, 130, 8),
        "Nd": (3, 1, 40, 7),
        "Ld": (17, 64, 1, 65, 130, 300, 16),
        "d": (128, 1, 48, 64, 7, 96, 128, 40, 256, 8, 768),
        "nbits": (2, 4, 1, 8),
        "dtype": (BF16, FP16, BF16, FP32, FP16, FP64),
        "normalize": (True, True, False),
    }
    turns = {name: [] for name in values}
    for _ in range(count):
        for name, of in values.items():
            if not turns[name]:
                turns[name] = pick.sample(of, len(of))
        yield Case(**{name: turn.pop() for name, turn in turns.items()})


CASES = list(walk(90))
COMMON = Case(2, 32, 40, 130, 128, 2, BF16, True)


@dataclass
class Index:
    """A compressed corpus, padded, and its tokens as they are without compression."""

    codes: torch.Tensor
    residuals: torch.Tensor
    lengths: torch.Tensor
    centroids: torch.Tensor
    weights: torch.Tensor
    nbits: int
    tokens: torch.Tensor  # float64, [Nd, Ld, d]

    @property
    def mask(self):
        return torch.arange(self.codes.shape[1], device=self.codes.device) < self.lengths.unsqueeze(1)

    @property
    def padded(self):
        return self.codes, self.residuals, self.lengths, self.centroids, self.weights, self.nbits

    @property
    def packed(self):
        offsets = torch.zeros(len(self.lengths) + 1, dtype=torch.int32, device=self.codes.device)
        offsets[1:] = self.lengths.cumsum(0)
        return (
            *(self.codes[self.mask], self.residuals[self.mask], offsets),
            *(self.centroids, self.weights, self.nbits),
        )


def unpacked(residuals, nbits, d):
    """Bucket by bucket, bit by bit."""
    bits = torch.stack([(residuals >> i) & 1 for i in range(8)], -1).flatten(-2).long()
    groups = bits[..., : d * nbits].unflatten(-1, (d, nbits))
    return (groups * 2 ** torch.arange(nbits, device=residuals.device)).sum(-1)


def draw(case, device, empty=True):
    """Q and an index whose centroids and weights are exact in the dtype of Q, as are the tokens then."""
    n = 50
    Q = torch.randn(case.Nq, case.Lq, case.d, device=device, dtype=FP32).to(case.dtype)
    centroids = torch.randn(n, case.d, device=device, dtype=FP32).to(case.dtype)
    weights = (torch.randn(2**case.nbits, device=device) * 0.3).to(case.dtype).float()
    codes = torch.randint(n, (case.Nd, case.Ld), device=device, dtype=torch.int32)
    residuals = torch.randint(256, (*codes.shape, (case.d * case.nbits + 7) // 8), device=device)
    residuals = residuals.to(torch.uint8)
    lengths = torch.randint(0 if empty else 1, case.Ld + 1, (case.Nd,), device=device)
    lengths[-1] = case.Ld
    tokens = centroids.double()[codes.long()] + weights.double()[unpacked(residuals, case.nbits, case.d)]
    return Q, Index(codes, residuals, lengths, centroids, weights, case.nbits, tokens.to(case.dtype).double())


def expected(Q, index, normalize):
    return ref.maxsim(Q.double(), index.tokens, None, index.mask, normalize)


def both(Q, index, normalize=True):
    """(name, scores) of the two layouts."""
    yield "padded", residual(Q, *index.padded, normalize=normalize)
    yield "packed", residual_varlen(Q, *index.packed, normalize=normalize)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_and_winners(case, device):
    Q, index = draw(case, device)
    scores, winners = expected(Q, index, case.normalize)
    # No maximum keeps the sum over one token from cancelling.
    limit = ref.tolerance(case.dtype) * (10 if case.Ld == 1 else 1)
    for _, out in both(Q, index, case.normalize):
        assert out.dtype == (FP64 if case.dtype == FP64 else FP32)
        ref.assert_close(out, scores, limit)
    for args, kept in ((index.padded, torch.int16), (index.packed, torch.int32)):
        out, found = OPS.maxsim_residual_winners(Q, *args, case.normalize)
        assert found.dtype == kept
        ref.assert_close(out, scores, limit)
        ref.assert_winners_close(
            widen(found, case.Ld), winners, Q.double(), index.tokens, 1e-5, case.normalize
        )


@pytest.mark.parametrize("case", CASES[:60], ids=str)
def test_gradient(case, device):
    Q, index = draw(case, device, empty=False)
    Q.requires_grad_()
    grad_scores = torch.randn(case.Nq, case.Nd, device=device, dtype=FP64 if case.dtype == FP64 else FP32)
    for args, function in ((index.padded, residual), (index.packed, residual_varlen)):
        _, winners = OPS.maxsim_residual_winners(Q.detach(), *args, case.normalize)
        (grad,) = torch.autograd.grad(function(Q, *args, normalize=case.normalize), Q, grad_scores)
        wanted, _ = ref.gradients(
            grad_scores, Q.double(), index.tokens, widen(winners, case.Ld), case.normalize
        )
        assert grad.dtype == case.dtype
        if case.normalize and case.d == 1:  # the gradient is 0; rounding errors of its terms grow by 1 / |q|
            grad = grad * Q.detach().abs().clamp_max(1)
        ref.assert_close(grad, wanted, 2 * ref.GRAD_TOLERANCE[case.dtype], "grad_Q")


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype, limit", [(BF16, 3e-3), (FP16, 4e-4), (FP32, 1e-6)])
@pytest.mark.parametrize("kept", [FP16, FP32])
def test_an_index_of_another_dtype(kept, dtype, limit, nbits, device):
    """Its centroids and weights are rounded to the dtype of Q: scores err as those of rounded tokens do."""
    Q, index = draw(dataclasses.replace(COMMON, nbits=nbits, dtype=kept), device)
    Q = Q.to(dtype)
    wanted = reference.maxsim_residual_reference(Q.double(), *index.padded, normalize=True)
    for _, out in both(Q, index):
        ref.assert_close(out, wanted, limit)


def test_a_query_alone(device):
    Q, index = draw(COMMON, device)
    many = dict(both(Q, index))
    for name, one in both(Q[1], index):
        assert one.shape == (COMMON.Nd,)
        torch.testing.assert_close(one, many[name][1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("Lq", [0, 32])
def test_nothing_to_score(Lq, device):
    case = dataclasses.replace(COMMON, Lq=Lq)
    Q, index = draw(case, device)
    codes, residuals, lengths, *rest = index.padded
    assert not residual(Q, codes[:, :0], residuals[:, :0], lengths * 0, *rest).any()
    assert residual(Q, codes[:0], residuals[:0], lengths[:0], *rest).shape == (2, 0)
    offsets = torch.zeros(4, dtype=torch.int64, device=device)
    flat, packed = codes.flatten(), residuals.flatten(0, 1)
    assert not residual_varlen(Q, flat[:0], packed[:0], offsets, *rest).any()
    assert not residual_varlen(Q, flat, packed, offsets, *rest).any()
    assert residual_varlen(Q, flat, packed, offsets[:1], *rest).shape == (2, 0)
    assert residual(Q[:0], *index.padded).shape == (0, case.Nd)


def test_an_empty_document_scores_0_and_has_no_gradient(device):
    Q, index = draw(COMMON, device)
    index.lengths[3] = 0
    for _, out in both(Q, index):
        assert not out[:, 3].any()
    Q.requires_grad_()
    with pytest.raises(ValueError, match="doc_lengths holds a zero-length document"):
        residual(Q, *index.padded)
    with pytest.raises(ValueError, match="cu_seqlens_d holds a zero-length document"):
        residual_varlen(Q, *index.packed)
    with torch.no_grad():
        assert not residual(Q, *index.padded)[:, 3].any()
    # The operator itself sends none, whatever comes for it.
    grad_scores = torch.zeros(COMMON.Nq, COMMON.Nd, device=device)
    for grad_scores[:, 3] in (1.0, torch.inf):
        (grad,) = torch.autograd.grad(OPS.maxsim_residual(Q, *index.padded), Q, grad_scores)
        assert not grad.any()


OUT_OF_RANGE = {
    torch.int32: (-1, 50, 2**31 - 1, -(2**31)),
    # Those that int32 cannot hold would wrap to 7, -1 and 0.
    torch.int64: (-1, 50, 2**31, 2**32 + 7, 2**32 - 1, -(2**32) + 7, -(2**31) - 1, 2**63 - 1, -(2**63)),
    torch.int16: (-1, 50, 300),
    torch.int8: (-1, 50),
    torch.uint8: (50, 255),
}


@pytest.mark.parametrize(
    ("dtype", "code"), [(dtype, code) for dtype, codes in OUT_OF_RANGE.items() for code in codes]
)
def test_codes_out_of_range_count_as_0(dtype, code, device):
    Q, index = draw(COMMON, device)
    index.codes = index.codes.to(dtype)
    table = torch.randn(50, COMMON.Lq, device=device)

    def scores():
        approximate = plaid.plaid_approx_score(table, index.codes, index.lengths)
        return {"approximate": approximate} | dict(both(Q, index))

    index.codes[:, ::3] = code
    wrong = scores()
    index.codes[:, ::3] = 0
    for name, out in scores().items():
        assert torch.equal(out, wrong[name]), name


@pytest.mark.parametrize("d", [128, 40])
def test_nan_and_infinity(d, device):
    case = dataclasses.replace(COMMON, d=d, Lq=8)
    for normalize in (True, False):
        for value in (float("nan"), float("inf"), float("-inf")):
            Q, index = draw(case, device)
            index.centroids[7, 3] = value
            index.tokens[index.codes == 7, 3] = value
            wanted, winners = expected(Q, index, normalize)
            for _, out in both(Q, index, normalize):
                ref.assert_close(out, wanted, 5e-6)
            _, found = OPS.maxsim_residual_winners(Q, *index.padded, normalize)
            rare = ~torch.isfinite(wanted)
            assert torch.equal(found[rare].int(), winners[rare].int())


def test_ties_go_to_the_first_token(device):
    Q, index = draw(dataclasses.replace(COMMON, dtype=FP32), device)
    index.codes[:] = 5
    index.residuals[:] = 0
    _, winners = OPS.maxsim_residual_winners(Q, *index.padded)
    assert torch.equal(winners[:, index.lengths > 0], torch.zeros_like(winners[:, index.lengths > 0]))


def test_tokens_without_a_norm(device):
    Q, index = draw(dataclasses.replace(COMMON, dtype=FP32), device)
    index.centroids[3] = 0
    index.weights[:] = 0
    Q[0, 0] = 0
    wanted = reference.maxsim_residual_reference(Q.double(), *index.padded, normalize=True)
    for _, out in both(Q, index):
        ref.assert_close(out, wanted, 5e-6)


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
@pytest.mark.parametrize("form", ["sliced", "shifted", "expanded", "int64", "uint8"])
def test_memory_layout_does_not_change_scores(form, nbits, device):
    Q, index = draw(dataclasses.replace(COMMON, nbits=nbits), device)
    codes, residuals, lengths, centroids, weights, _ = index.padded
    dense = residual(Q, *index.padded)
    if form == "sliced":
        codes = torch.nn.functional.pad(codes, (2, 3))[:, 2:-3]
        residuals = torch.nn.functional.pad(residuals, (1, 2, 2, 3))[:, 2:-3, 1:-2]
        centroids = centroids.repeat(1, 2)[:, :128]
        Q = Q.transpose(1, 2).contiguous().transpose(1, 2)
    elif form == "shifted":  # one element into their storage
        residuals, centroids, weights = map(begun, (residuals, centroids, weights))
    elif form == "expanded":
        codes, residuals = codes[:1].expand_as(codes), residuals[:1].expand_as(residuals)
        same = (codes.contiguous(), residuals.contiguous(), lengths, centroids, weights, nbits)
        dense = residual(Q, *same)
        Q = Q[:1].expand(3, -1, -1)
        dense = dense[:1].expand(3, -1)
    elif form == "int64":
        codes, lengths = codes.long(), lengths.int()
    else:
        codes, lengths = codes.to(torch.uint8), lengths.to(torch.uint8)
    out = residual(Q, codes, residuals, lengths, centroids, weights, nbits)
    torch.testing.assert_close(out, dense, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lengths", ["one long", "many short", "rising"])
def test_documents_of_different_lengths(lengths, device):
    counts = {
        "one long": [1, 5000, 3, 0, 40],
        "many short": [i % 4 for i in range(3000)],
        "rising": [*range(200)],
    }[lengths]
    case = Case(2, 20, len(counts), 1, 128, 4, FP16, True)
    Q, index = draw(dataclasses.replace(case, Nd=1, Ld=sum(counts)), device)
    offsets = torch.tensor([0, *counts], device=device).cumsum(0)
    out = residual_varlen(
        Q, index.codes[0], index.residuals[0], offsets, index.centroids, index.weights, 4, normalize=True
    )
    ref.assert_close(out, ref.maxsim_of_packed(Q, index.tokens[0], offsets, normalize=True), 5e-6)


# A GPU cuts the long ones of these into pieces that several blocks take.
LONG = [0, 5000, 3, 2600, 513, 512, 40, 1100]


def packed_of(index, counts, device):
    offsets = torch.tensor([0, *counts], device=device, dtype=torch.int32).cumsum(0)
    return index.codes[0], index.residuals[0], offsets, index.centroids, index.weights, index.nbits


@pytest.mark.parametrize("case", [(1, 32, BF16), (3, 33, BF16), (2, 70, FP16), (1, 1, FP32)], ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_winners_of_long_documents(normalize, case, device):
    Nq, Lq, dtype = case
    Q, index = draw(Case(Nq, Lq, 1, sum(LONG), 64, 2, dtype, normalize), device)
    index.residuals.zero_()  # so all tokens of a code are the same, and the first one wins
    index.centroids[7] = float("nan")
    index.codes[index.codes == 7] = 8
    index.codes[0, [6000, 7500]] = 7  # of document 3 alone
    args = packed_of(index, LONG, device)
    options = index.nbits, normalize, "highest"
    scores, winners = OPS.maxsim_residual_winners(Q, *args[:-1], *options)
    assert torch.equal(scores.isnan(), torch.tensor([j == 3 for j in range(8)], device=device).expand(Nq, 8))
    torch.testing.assert_close(OPS.maxsim_residual(Q, *args[:-1], *options), scores, equal_nan=True)
    tokens = (index.centroids.double() + index.weights[0].double()).to(dtype).double()
    unit = [t / t.norm(dim=-1, keepdim=True) if normalize else t for t in (Q.double(), tokens)]
    similarity = torch.einsum("isd,td->ist", *unit)
    for j, (a, b) in enumerate(itertools.pairwise(args[2].tolist())):
        codes = index.codes[0, a:b].long()
        if a == b or j == 3:
            wanted = torch.full((Nq, Lq), -1 if a == b else 6000 - a, device=device)
            assert torch.equal(winners[:, j].long(), wanted)
            continue
        won = winners[:, j].long()
        best = similarity[..., codes]
        assert bool((best.gather(-1, won.unsqueeze(-1)).squeeze(-1) >= best.amax(-1) - 1e-4).all())
        first = (codes == codes[won].unsqueeze(-1)).int().argmax(-1)
        assert torch.equal(won, first)


def test_long_documents_have_the_same_bits_in_pieces(device):
    Q, index = draw(Case(1, 1, 1, sum(LONG), 128, 4, FP16, True), device)
    args = packed_of(index, LONG, device)
    whole = residual_varlen(Q, *args)
    first = 0
    for j, count in enumerate(LONG):
        short = [min(400, count - k) for k in range(0, count, 400)]
        if short:
            offsets = first + torch.tensor([0, *short], device=device, dtype=torch.int32).cumsum(0)
            parts = residual_varlen(Q, *args[:2], offsets, *args[3:])
            assert torch.equal(parts.amax(), whole[0, j])  # one query token: a score is its maximum
        first += count


@pytest.mark.gpu
def test_long_documents_score_the_same_in_every_run():
    Q, index = draw(Case(3, 33, 1, sum(LONG), 128, 2, BF16, True), "cuda")
    args = packed_of(index, LONG, "cuda")
    scores = residual_varlen(Q, *args)
    for _ in range(100):
        assert torch.equal(residual_varlen(Q, *args), scores)


@pytest.mark.gpu
def test_offsets_that_name_more_tokens_than_there_are():
    Q, index = draw(Case(2, 20, 1, 3000, 128, 4, FP16, True), "cuda")
    codes, residuals, _, *rest = packed_of(index, [3000], "cuda")
    again = torch.tensor([0, 3000] * 5, device="cuda", dtype=torch.int32)
    scores = residual_varlen(Q, codes, residuals, again, *rest)
    alone = residual_varlen(Q, codes, residuals, again[:2], *rest)
    assert torch.equal(scores[:, ::2], alone.expand(-1, 5)) and not scores[:, 1::2].any()


@pytest.mark.gpu
def test_offsets_and_lengths_that_make_no_sense_read_nothing_else():
    Q, index = draw(COMMON, "cuda")
    codes, residuals, _, *rest = index.packed
    tokens = len(codes)
    # Documents 0, 1 and 3 end before they begin; the others are cut to the tokens that there are.
    wrong = torch.tensor([5, 3, -7, 10**6, 20, 40, 2**31 - 1], dtype=torch.int32, device="cuda")
    scores = residual_varlen(Q, codes, residuals, wrong, *rest)
    assert not scores[:, [0, 1, 3]].any()
    for document, (begin, end) in {2: (0, tokens), 4: (20, 40), 5: (40, tokens)}.items():
        offsets = torch.tensor([begin, end], device="cuda")
        alone = residual_varlen(Q, codes, residuals, offsets, *rest)
        assert torch.equal(scores[:, document], alone[:, 0])
    codes, residuals, _, *rest = index.padded
    lengths = torch.full((COMMON.Nd,), 10**9, device="cuda")
    lengths[0] = -5
    out = residual(Q, codes, residuals, lengths, *rest)
    assert torch.equal(out, residual(Q, codes, residuals, lengths.clamp(0, COMMON.Ld), *rest))


@pytest.mark.parametrize("d", [4096, 40000])
def test_embeddings_of_any_length(d, device):
    Q, index = draw(Case(1, 9, 2, 20, d, 2, FP16, True), device)
    wanted, _ = expected(Q, index, True)
    for _, out in both(Q, index):
        ref.assert_close(out, wanted, 2e-5)


# ---- scores by centroids alone ----


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16])
@pytest.mark.parametrize("Lq", [32, 1, 7, 36, 130])
@pytest.mark.parametrize("B, Ld", [(9, 33), (1, 1), (300, 5), (4, 400)])
def test_approximate_scores(B, Ld, Lq, dtype, device):
    table = torch.randn(70, Lq, device=device, dtype=FP64).to(dtype)
    codes = torch.randint(-3, 75, (B, Ld), device=device)
    lengths = torch.randint(Ld + 1, (B,), device=device)
    scores = plaid.plaid_approx_score(table, codes, lengths)
    assert scores.dtype == (FP64 if dtype == FP64 else FP32) and scores.shape == (B,)
    known = torch.where((codes >= 0) & (codes < 70), codes, 0)
    for j in range(B):
        rows = table.double()[known[j, : lengths[j]]]
        wanted = rows.amax(0).sum() if len(rows) else torch.zeros((), dtype=FP64)
        assert abs(scores[j].item() - wanted.item()) <= 1e-5 * max(1, Lq)
    ref.assert_close(scores, reference.plaid_approx_score_reference(table.double(), codes, lengths), 1e-5)


def test_approximate_scores_at_the_edges(device):
    table, codes = torch.randn(5, 4, device=device), torch.zeros(3, 6, dtype=torch.int32, device=device)
    none = torch.zeros(3, dtype=torch.int64, device=device)
    assert not plaid.plaid_approx_score(table, codes, none).any()
    assert not plaid.plaid_approx_score(table, codes[:, :0], none).any()
    assert plaid.plaid_approx_score(table, codes[:0], none[:0]).shape == (0,)
    assert not plaid.plaid_approx_score(table[:, :0], codes, none + 2).any()
    table[0, 2] = float("nan")
    assert plaid.plaid_approx_score(table, codes, none + 2).isnan().all()
    assert torch.equal(
        plaid.plaid_approx_score(table.T.contiguous().T, codes[:, ::2], none + 2).isnan(), none == 0
    )


def test_reverse_bits():
    every = torch.arange(256, dtype=torch.uint8)
    wanted = [int(f"{i:08b}"[::-1], 2) for i in range(256)]
    assert codecs.reverse_bits(every).tolist() == wanted
    assert torch.equal(codecs.reverse_bits(codecs.reverse_bits(every.view(4, 64))), every.view(4, 64))
    for bad in (every.int(), [1]):
        with pytest.raises(TypeError, match="residuals must be a uint8 tensor"):
            codecs.reverse_bits(bad)


# ---- citizens of PyTorch ----


@pytest.mark.gpu
def test_cuda_graph_without_synchronization():
    Q, index = draw(COMMON, "cuda")
    table = torch.randn(50, 32, device="cuda")
    padded, packed = index.padded, index.packed

    def run():
        scores = residual(Q, *padded), residual_varlen(Q, *packed)
        return [*scores, plaid.plaid_approx_score(table, index.codes, index.lengths)]

    run()
    with waiting_for_nothing():
        run()
    graph, captured = in_graph(run)
    index.residuals.random_(256)
    packed[1].random_(256)
    Q.mul_(-1.5)
    graph.replay()
    assert all(map(torch.equal, captured, run()))
