"""Residual codes: centroids and buckets that are trained, tokens compressed and decompressed."""

import pytest
import torch

from late_interaction import plaid, residual_codec
from late_interaction.reference.compressed import decompressed
from late_interaction.residual_codec import ResidualCodec


def unit(x):
    return torch.nn.functional.normalize(x, dim=-1)


def clustered(count, d, clusters=20, spread=0.2):
    centers = unit(torch.randn(clusters, d))
    return unit(centers[torch.randint(clusters, (count,))] + spread * torch.randn(count, d) / d**0.5)


@pytest.mark.parametrize("nbits, error", [(1, 0.22), (2, 0.16), (4, 0.09), (8, 0.03)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_back(nbits, error, dtype, device):
    tokens = clustered(4000, 32).to(device)
    codec = ResidualCodec.train(tokens, 64, nbits=nbits, dtype=dtype)
    assert codec.centroids.dtype == dtype and codec.d == 32 and codec.bytes == 4 * nbits
    codes, residuals = codec.compress(tokens)
    again = codec.decompress(codes, residuals)
    assert again.dtype == torch.float32 and (again - tokens).norm() < error * tokens.norm()


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
@pytest.mark.parametrize("d", [1, 5, 16, 40])
@pytest.mark.parametrize("count", [0, 1, 511, 513, 1100])
def test_codes_by_definition(nbits, d, count, device):
    """Tokens of small integers: sums are exact, so that the nearest centroid is the same everywhere."""
    centroids = torch.randint(-3, 4, (37, d), device=device).float()
    cutoffs = torch.arange(2**nbits - 1, device=device) - 2.0 ** (nbits - 1) + 0.5
    codec = ResidualCodec(centroids, cutoffs, torch.randn(2**nbits, device=device), nbits)
    tokens = torch.randint(-3, 4, (count, d), device=device).float()
    codes, residuals = codec.compress(tokens)
    wanted = (tokens @ centroids.T).argmax(1) if count else codes
    assert codes.dtype == torch.int32 and torch.equal(codes.long(), wanted.long())
    assert residuals.shape == (count, (d * nbits + 7) // 8)
    rest = tokens - centroids[codes.long()]
    buckets = (rest.unsqueeze(-1) > cutoffs).sum(-1)
    wanted = centroids[codes.long()] + codec.bucket_weights[buckets]
    assert torch.equal(codec.decompress(codes, residuals), wanted)
    args = codes, residuals, codec.centroids, codec.bucket_weights, nbits
    torch.testing.assert_close(decompressed(torch.float64, *args), wanted.double(), rtol=1e-6, atol=1e-6)
    if d * nbits < 8 and count:  # bits past the last dim are 0
        assert int(residuals.max()) < 1 << (d * nbits)


def test_more_centroids_than_narrow_winners_hold(device):
    centroids = torch.zeros(66_000, 2, device=device)
    centroids[65_999, 0], centroids[40_000, 1] = 5, 5
    buckets = torch.zeros(1, device=device), torch.tensor([-0.1, 0.1], device=device)
    codec = ResidualCodec(centroids, *buckets, 1)
    codes, _ = codec.compress(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], device=device))
    assert codes.tolist() == [65_999, 40_000, 0]


def test_ties_go_to_the_first_centroid(device):
    centroids = torch.ones(7, 3, device=device)
    codec = ResidualCodec(
        centroids, torch.zeros(1, device=device), torch.tensor([-1.0, 1.0], device=device), 1
    )
    assert codec.compress(torch.randn(600, 3, device=device))[0].tolist() == [0] * 600


# ---- training ----


def k_means_reference(tokens, count, iterations, seed):
    """By definition, in float64, from the same first centroids."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(len(tokens), generator=generator)[:count].sort().values
    tokens = tokens.double()
    centroids = tokens[first]
    for _ in range(iterations):
        similarity = tokens @ centroids.T
        codes = similarity.argmax(1)
        own = similarity.gather(1, codes.unsqueeze(1)).squeeze(1)
        far = iter(own.sort(stable=True).indices.tolist())
        following = []
        for c in range(count):
            mine = tokens[codes == c]
            following.append(unit(mine.sum(0)) if len(mine) else tokens[next(far)])
        centroids = torch.stack(following)
    return centroids


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("tokens", [40, 700])
def test_k_means_by_definition(tokens, count, device):
    torch.manual_seed(1)
    x = clustered(tokens, 8, spread=1.0)
    codec = ResidualCodec.train(x.to(device), count, iterations=3, seed=5)
    wanted = k_means_reference(x, count, 3, 5)
    torch.testing.assert_close(codec.centroids.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


def test_centroids_without_tokens_move(device):
    """Many equal tokens: most of the first centroids are the same, and all but one of them win nothing."""
    x = torch.cat((unit(torch.ones(500, 4)), torch.eye(4).repeat(3, 1))).to(device)
    codec = ResidualCodec.train(x, 16, iterations=8)
    codes, residuals = codec.compress(x)
    assert len(codes.unique()) == 5
    assert (codec.decompress(codes, residuals) - x).abs().max() < 1e-5


def test_buckets_hold_equal_shares(device):
    x = clustered(5000, 16).to(device)
    codec = ResidualCodec.train(x, 32, nbits=2)
    rest = x - codec.centroids[codec.compress(x)[0].long()]
    shares = torch.bucketize(rest, codec.bucket_cutoffs).flatten().bincount(minlength=4) / rest.numel()
    assert (shares - 0.25).abs().max() < 0.01
    within = torch.bucketize(codec.bucket_weights, codec.bucket_cutoffs)
    assert within.tolist() == [0, 1, 2, 3]


def test_the_same_bits_in_every_run(device):
    x = clustered(3000, 16).to(device)
    first, second = (ResidualCodec.train(x, seed=3) for _ in range(2))
    assert torch.equal(first.centroids, second.centroids)
    assert torch.equal(first.bucket_weights, second.bucket_weights)
    assert len(first.centroids) == 256  # a power of two, at most one for 8 tokens
    assert not torch.equal(ResidualCodec.train(x, seed=4).centroids, first.centroids)


def test_tokens_that_are_not_normalized(device):
    x = 3 * clustered(2000, 8).to(device)
    codec = ResidualCodec.train(x, 16)
    torch.testing.assert_close(codec.centroids.norm(dim=-1), torch.ones(16, device=device))
    half = ResidualCodec.train(x.half(), 16, normalize=False)
    again = half.decompress(*half.compress(x.half()))
    assert (again - x).norm() < 0.75 * x.norm()


def test_scores_of_what_was_compressed(device):
    x = clustered(900, 32).to(device)
    codec = ResidualCodec.train(x, 64, nbits=4, normalize=True)
    codes, residuals = codec.compress(x)
    offsets = torch.tensor([0, 300, 300, 900], device=device)
    Q = clustered(7, 32).to(device)
    scores = plaid.maxsim_residual_varlen(
        Q, codes, residuals, offsets, codec.centroids, codec.bucket_weights, codec.nbits, normalize=True
    )
    tokens = unit(codec.decompress(codes, residuals))
    wanted = torch.stack([(Q @ part.T).amax(1).sum() for part in (tokens[:300], tokens[300:])])
    torch.testing.assert_close(scores[[0, 2]], wanted, rtol=1e-5, atol=1e-5)
    assert scores[1] == 0


# ---- bad input ----

GOOD = {
    "centroids": torch.eye(4),
    "bucket_cutoffs": torch.tensor([-0.1, 0.0, 0.1]),
    "bucket_weights": torch.tensor([-0.2, -0.05, 0.05, 0.2]),
    "nbits": 2,
}


@pytest.mark.parametrize(
    "bad, error, words",
    [
        ({"nbits": 3}, ValueError, "nbits must be 1, 2, 4 or 8, got 3"),
        ({"centroids": [1.0]}, TypeError, "centroids"),
        ({"centroids": torch.eye(4).double()}, TypeError, "float64"),
        ({"centroids": torch.ones(4)}, ValueError, r"centroids must be \[n, d\]"),
        ({"centroids": torch.ones(0, 4)}, ValueError, r"got \[0, 4\]"),
        ({"centroids": torch.full((2, 4), float("nan"))}, ValueError, "centroids must be finite"),
        ({"bucket_cutoffs": torch.zeros(4)}, ValueError, r"bucket_cutoffs must be \[3\] for nbits = 2"),
        ({"bucket_cutoffs": torch.tensor([0.1, 0.0, 0.2])}, ValueError, "bucket_cutoffs must not decrease"),
        ({"bucket_weights": torch.zeros(3)}, ValueError, r"bucket_weights must be \[4\]"),
        ({"bucket_weights": torch.full((4,), float("inf"))}, ValueError, "bucket_weights must be finite"),
    ],
)
def test_bad_codecs(bad, error, words):
    with pytest.raises(error, match=words):
        ResidualCodec(**{**GOOD, **bad})


@pytest.mark.parametrize(
    "args, error, words",
    [
        ((torch.randn(8, 4), 9), ValueError, "n_centroids must be at most 8, one a token, got 9"),
        ((torch.randn(8, 4), 0), ValueError, "n_centroids must be at least 1, got 0"),
        ((torch.randn(0, 4),), ValueError, "tokens must be at least one"),
        ((torch.randn(2, 8, 4),), ValueError, r"tokens must be \[tokens, d\], got \[2, 8, 4\]"),
        ((torch.full((8, 4), float("nan")), 2), ValueError, "tokens must be finite"),
        ((torch.zeros(8, 4, dtype=torch.int32), 2), TypeError, "tokens"),
    ],
)
def test_bad_training(args, error, words):
    with pytest.raises(error, match=words):
        ResidualCodec.train(*args)


def test_bad_tokens_and_codes():
    codec = ResidualCodec(**GOOD)
    with pytest.raises(ValueError, match=r"tokens must be \[tokens, 4\], got \[3, 5\]"):
        codec.compress(torch.ones(3, 5))
    with pytest.raises(ValueError, match="tokens must be finite"):
        codec.compress(torch.full((3, 4), float("inf")))
    codes, residuals = codec.compress(torch.eye(4))
    with pytest.raises(TypeError, match=r"codes must be a torch.int32 tensor, got torch.int64"):
        codec.decompress(codes.long(), residuals)
    with pytest.raises(ValueError, match=r"codes and residuals must be \[tokens\] and \[tokens, 1\]"):
        codec.decompress(codes, residuals[:2])
    with pytest.raises(ValueError, match="codes must all be >= 0 and < 4"):
        codec.decompress(codes + 1, residuals)


# ---- numbers at their bounds ----


def sample(tokens=300, d=8):
    return torch.randn(tokens, d, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("seed", [-(1 << 63), (1 << 64) - 1, 1 << 63])
def test_seeds_that_pytorch_takes(seed):
    codec = ResidualCodec.train(sample(), 8, seed=seed)
    assert torch.equal(codec.centroids, ResidualCodec.train(sample(), 8, seed=seed).centroids)


@pytest.mark.parametrize("seed", [-(1 << 63) - 1, 1 << 64])
def test_seeds_that_pytorch_does_not_take(seed):
    with pytest.raises(ValueError, match=r"seed must lie in \[-2\*\*63, 2\*\*64\)"):
        ResidualCodec.train(sample(), 8, seed=seed)


def test_how_many_centroids_there_are_by_themselves():
    """A power of 2 of at most an eighth of the tokens, and at most 16 of their square root."""
    counts = {
        1: 1,
        9: 1,
        15: 1,
        16: 2,
        32: 4,
        100: 8,
        5000: 512,
        1 << 14: 2048,
        1 << 15: 2048,
        60_000: 2048,
        1 << 16: 4096,
    }
    assert {n: residual_codec._default_count(n) for n in counts} == counts
    assert len(ResidualCodec.train(sample(), iterations=1).centroids) == 32


def test_normalized_samples_have_the_length_1():
    tokens = sample() * torch.rand(300, 1).add(0.001)
    tokens[7] = 0.0
    unit = torch.nn.functional.normalize(tokens, dim=-1)
    codec, same = (
        ResidualCodec.train(tokens, 8, normalize=True),
        ResidualCodec.train(unit, 8, normalize=False),
    )
    torch.testing.assert_close(codec.centroids, same.centroids, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(codec.bucket_weights, same.bucket_weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(codec.centroids.norm(dim=-1), torch.ones(8), rtol=1e-5, atol=1e-5)


def test_buckets_are_those_of_the_sorted_residuals():
    """Cutoffs at 1/4, 2/4 and 3/4 of them, and between these the values that codes stand for."""
    tokens = torch.arange(18.0).square().unsqueeze(1)
    cutoffs, weights = residual_codec._buckets(
        tokens, torch.zeros(18, dtype=torch.int32), torch.zeros(1, 1), 2
    )
    assert cutoffs.tolist() == [16.0, 64.0, 169.0] and weights.tolist() == [4.0, 36.0, 121.0, 225.0]


@pytest.mark.parametrize("tokens", [torch.ones(8), torch.ones(2, 3, 8), torch.ones(3, 7), torch.ones(3, 9)])
def test_tokens_of_another_shape(tokens):
    codec = ResidualCodec.train(sample(), 8)
    with pytest.raises(ValueError, match=r"tokens must be \[tokens, 8\]"):
        codec.compress(tokens)
    if tokens.dim() != 2:
        with pytest.raises(ValueError, match=r"tokens must be \[tokens, d\]"):
            ResidualCodec.train(tokens)


@pytest.mark.parametrize(
    ("codes", "residuals"),
    [
        ((), (1, 2)),
        ((2, 2), (2, 2)),
        ((3,), (2, 2)),
        ((2,), (3, 2)),
        ((2,), (2, 3)),
        ((2,), (2, 1)),
        ((2,), (4,)),
    ],
)
def test_codes_of_another_shape(codes, residuals):
    codec = ResidualCodec.train(sample(), 8)
    with pytest.raises(ValueError, match=r"codes and residuals must be \[tokens\] and \[tokens, 2\]"):
        codec.decompress(torch.zeros(codes, dtype=torch.int32), torch.zeros(residuals, dtype=torch.uint8))


@pytest.mark.parametrize("code", [-1, 8])
def test_codes_of_no_centroid(code):
    codec = ResidualCodec.train(sample(), 8)
    with pytest.raises(ValueError, match="codes must all be >= 0 and < 8"):
        codec.decompress(torch.tensor([0, code], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", ["float32", torch.float64, None])
def test_dtypes_of_no_centroid(dtype):
    with pytest.raises(TypeError, match="dtype must be torch"):
        ResidualCodec.train(sample(), 8, dtype=dtype)


@pytest.mark.parametrize(
    "centroids", [torch.ones(8), torch.ones(1, 2, 8), torch.ones(0, 8), torch.ones(1).expand(1 << 31, 1)]
)
def test_centroids_of_another_shape(centroids):
    good = ResidualCodec.train(sample(), 8)
    with pytest.raises(ValueError, match=r"centroids must be \[n, d\] with at least one row"):
        ResidualCodec(centroids, good.bucket_cutoffs, good.bucket_weights, nbits=2)


def test_cutoffs_that_fall():
    good = ResidualCodec.train(sample(), 8)
    for order in ([1, 0, 2], [0, 2, 1], [2, 1, 0]):
        with pytest.raises(ValueError, match="bucket_cutoffs must not decrease"):
            ResidualCodec(good.centroids, good.bucket_cutoffs[order], good.bucket_weights, nbits=2)


def test_no_token_is_compressed_to_nothing():
    codes, residuals = ResidualCodec.train(sample(), 8).compress(torch.empty(0, 8))
    assert codes.shape == (0,) and residuals.shape == (0, 2)


def test_more_tokens_than_one_query_has():
    """513 of them, which are 512 and one."""
    codec, tokens = ResidualCodec.train(sample(700), 16), sample(513)
    codes = codec.compress(tokens)[0]
    assert torch.equal(codes.long(), (tokens @ codec.centroids.T).argmax(1))


def test_a_codec_on_its_device_is_itself():
    codec = ResidualCodec.train(sample(), 8)
    assert codec.to("cpu") is codec


def test_centroids_of_short_tokens_and_of_opposite_ones():
    """Sums of tokens are normalized, whatever their norm; of those that cancel out remains 0."""
    codec = ResidualCodec.train(sample() * 1e-3, 8, normalize=False)
    torch.testing.assert_close(codec.centroids.norm(dim=-1), torch.ones(8), rtol=1e-5, atol=1e-5)
    x = torch.tensor([[3.0, 4.0], [-3.0, -4.0]])
    assert ResidualCodec.train(x, 1, normalize=False).centroids.tolist() == [[0.0, 0.0]]
