"""maxsim_residual_normed: residual-compressed documents scored from the norms of their tokens, on a GPU."""

import pytest
import torch

import late_interaction as li
from tests.support import ref
from tests.support.packed import offsets

OPS = torch.ops.late_interaction
LENGTHS = {
    "empty, short": [0, 1, 0, 2, 1, 0],
    "odd, prime": [13, 7, 31, 97, 3, 64, 61],
    "8 to 64": list(range(8, 65)) * 5,
    "past a tile": [33, 64, 0, 770, 1, 65, 300],
    "none": [],
}


def make(lengths, queries, dtype, centroids=37, stray=2):
    """Queries, and documents of which `stray` tokens at either end belong to none."""
    cu = offsets(lengths, stray).cuda()
    count = int(cu[-1]) + stray
    table = torch.nn.functional.normalize(torch.randn(centroids, 128, device="cuda"), dim=-1).to(dtype)
    weights = torch.tensor([-0.11, -0.031, 0.027, 0.13], device="cuda")
    codes = torch.randint(centroids, (count,), device="cuda", dtype=torch.int32)
    residuals = torch.randint(256, (count, 32), device="cuda", dtype=torch.uint8)
    Q = torch.nn.functional.normalize(torch.randn(*queries, 128, device="cuda"), dim=-1).to(dtype)
    return Q, codes, residuals, cu, table, weights


def decompressed(codes, residuals, table, weights):
    buckets = torch.stack([residuals >> 2 * i & 3 for i in range(4)], -1).flatten(1).long()
    return table.double()[codes.long()] + weights.double()[buckets]


@pytest.mark.gpu
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("queries", [(1, 32), (3, 5), (2, 70), (1, 1)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_scores(lengths, queries, normalized):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        Q, codes, residuals, cu, table, weights = make(lengths, queries, dtype)
        x = decompressed(codes, residuals, table, weights)
        norms = None
        if normalized:
            Q = Q * 3  # both sides are normalized
            norms = x.norm(dim=-1)
            x, norms = x / norms.unsqueeze(-1), (1 / norms).half()
        found = OPS.maxsim_residual_normed(Q, codes, residuals, norms, cu, table, weights)
        wanted = ref.maxsim_of_packed(ref.unit(Q.double()) if normalized else Q, x, cu)
        assert found.dtype == torch.float32
        # These residuals have norms of about 1, and their similarities err by a step of int8 of Q.
        assert found.shape == wanted.shape and bool(((found - wanted).abs() <= 3e-3 * queries[1]).all())
        assert torch.equal(found, OPS.maxsim_residual_normed(Q, codes, residuals, norms, cu, table, weights))


@pytest.mark.gpu
def test_strays():
    Q, codes, residuals, cu, table, weights = make([5, 0, 40], (2, 9), torch.float16)
    norms = torch.ones(codes.shape, device="cuda").half()
    before = OPS.maxsim_residual_normed(Q, codes, residuals, norms, cu, table, weights)
    codes[:2], codes[-2:] = 1 << 30, -1  # of no document
    norms[:2] = norms[-1] = torch.nan
    assert torch.equal(OPS.maxsim_residual_normed(Q, codes, residuals, norms, cu, table, weights), before)
    shifted = residuals.new_empty(residuals.numel() + 1)[1:].view(residuals.shape).copy_(residuals)
    assert torch.equal(OPS.maxsim_residual_normed(Q, codes, shifted, norms, cu, table, weights), before)
    bad = Q.clone()
    bad[0, 3, 7] = torch.nan
    found = OPS.maxsim_residual_normed(bad, codes, residuals, norms, cu, table, weights)
    assert found[0, [0, 2]].isnan().all() and (found[:, 1] == 0).all() and torch.equal(found[1], before[1])


@pytest.mark.gpu
def test_refusals():
    Q, codes, residuals, cu, table, weights = make([5, 7], (2, 9), torch.float16)
    norms = torch.ones(codes.shape, device="cuda").half()
    with pytest.raises(RuntimeError, match="128 dims"):
        OPS.maxsim_residual_normed(Q[..., :64], codes, residuals[:, :16], norms, cu, table[:, :64], weights)
    with pytest.raises(RuntimeError, match="inverse_norms"):
        OPS.maxsim_residual_normed(Q, codes, residuals, norms.float(), cu, table, weights)
    with pytest.raises(RuntimeError, match="inverse_norms"):
        OPS.maxsim_residual_normed(Q, codes, residuals, norms[1:], cu, table, weights)


@pytest.mark.gpu
def test_corpus_finds_what_decompressed_tokens_find():
    torch.manual_seed(0)
    lengths = torch.randint(1, 40, (5000,))
    x = torch.nn.functional.normalize(torch.randn(int(lengths.sum()), 128), dim=-1)
    codec = li.codecs.Residual.train(x[:20000], 64, nbits=2, normalize=True, dtype=torch.float16)
    codes = codec.encode(li.Tokens.packed(x, offsets(lengths.tolist()))).to("cuda")
    corpus, Q = li.Corpus.from_codes(codes), x[:32].half().cuda()[None]
    found = corpus.search(Q, 10, normalize=True)
    scores = li.maxsim(Q, codes, normalize=True)
    assert (found.scores - scores.gather(1, found.indices)).abs().max() < 0.03
    assert (found.scores[:, -1] > scores.topk(10).values[:, -1] - 0.06).all()
