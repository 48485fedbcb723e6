"""Residual codes: centroids and buckets that are trained, tokens compressed and decompressed."""

import pytest
import torch

import late_interaction as li
from late_interaction import Codes, codecs
from late_interaction.reference.compressed import decompressed


def unit(x):
    return torch.nn.functional.normalize(x, dim=-1)


def compress(codec, tokens):
    """Centroids and residuals of ``[tokens, d]``."""
    codes = codec.encode(tokens)
    return codes.centroids.squeeze(0), codes.values.squeeze(0)


def decompress(codec, centroids, residuals):
    return codec.decode(Codes(codec, residuals[None], centroids=centroids[None]))[0]


def clustered(count, d, clusters=20, spread=0.2):
    centers = unit(torch.randn(clusters, d))
    return unit(centers[torch.randint(clusters, (count,))] + spread * torch.randn(count, d) / d**0.5)


@pytest.mark.parametrize("nbits, error", [(1, 0.22), (2, 0.16), (4, 0.09), (8, 0.03)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_back(nbits, error, dtype, device):
    tokens = clustered(4000, 32).to(device)
    codec = codecs.Residual.train(tokens, 64, nbits=nbits, dtype=dtype)
    assert codec.centroids.dtype == dtype and codec.d == 32 and codec.width(32) == 4 * nbits
    codes, residuals = compress(codec, tokens)
    again = decompress(codec, codes, residuals)
    assert again.dtype == torch.float32 and (again - tokens).norm() < error * tokens.norm()


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
@pytest.mark.parametrize("d", [1, 5, 16, 40])
@pytest.mark.parametrize("count", [0, 1, 511, 513, 1100])
def test_codes_by_definition(nbits, d, count, device):
    """Tokens of small integers: sums are exact, so that the nearest centroid is the same everywhere."""
    centroids = torch.randint(-3, 4, (37, d), device=device).float()
    cutoffs = torch.arange(2**nbits - 1, device=device) - 2.0 ** (nbits - 1) + 0.5
    codec = codecs.Residual(centroids, cutoffs, torch.randn(2**nbits, device=device))
    tokens = torch.randint(-3, 4, (count, d), device=device).float()
    codes, residuals = compress(codec, tokens)
    wanted = (tokens @ centroids.T).argmax(1) if count else codes
    assert codes.dtype == torch.int32 and torch.equal(codes.long(), wanted.long())
    assert residuals.shape == (count, (d * nbits + 7) // 8)
    rest = tokens - centroids[codes.long()]
    buckets = (rest.unsqueeze(-1) > cutoffs).sum(-1)
    wanted = centroids[codes.long()] + codec.bucket_weights[buckets]
    assert torch.equal(decompress(codec, codes, residuals), wanted)
    args = codes, residuals, codec.centroids, codec.bucket_weights, nbits
    torch.testing.assert_close(decompressed(torch.float64, *args), wanted.double(), rtol=1e-6, atol=1e-6)
    if d * nbits < 8 and count:  # bits past the last dim are 0
        assert int(residuals.max()) < 1 << (d * nbits)


def test_more_centroids_than_narrow_winners_hold(device):
    centroids = torch.zeros(66_000, 2, device=device)
    centroids[65_999, 0], centroids[40_000, 1] = 5, 5
    buckets = torch.zeros(1, device=device), torch.tensor([-0.1, 0.1], device=device)
    codec = codecs.Residual(centroids, *buckets)
    codes, _ = compress(codec, torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], device=device))
    assert codes.tolist() == [65_999, 40_000, 0]


def test_ties_go_to_the_first_centroid(device):
    centroids = torch.ones(7, 3, device=device)
    codec = codecs.Residual(
        centroids, torch.zeros(1, device=device), torch.tensor([-1.0, 1.0], device=device)
    )
    assert compress(codec, torch.randn(600, 3, device=device))[0].tolist() == [0] * 600


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
    codec = codecs.Residual.train(x.to(device), count, iterations=3, seed=5)
    wanted = k_means_reference(x, count, 3, 5)
    torch.testing.assert_close(codec.centroids.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


def test_centroids_without_tokens_move(device):
    """Many equal tokens: most of the first centroids are the same, and all but one of them win nothing."""
    x = torch.cat((unit(torch.ones(500, 4)), torch.eye(4).repeat(3, 1))).to(device)
    codec = codecs.Residual.train(x, 16, iterations=8)
    codes, residuals = compress(codec, x)
    assert len(codes.unique()) == 5
    assert (decompress(codec, codes, residuals) - x).abs().max() < 1e-5


def test_buckets_hold_equal_shares(device):
    x = clustered(5000, 16).to(device)
    codec = codecs.Residual.train(x, 32, nbits=2)
    rest = x - codec.centroids[compress(codec, x)[0].long()]
    shares = torch.bucketize(rest, codec.bucket_cutoffs).flatten().bincount(minlength=4) / rest.numel()
    assert (shares - 0.25).abs().max() < 0.01
    within = torch.bucketize(codec.bucket_weights, codec.bucket_cutoffs)
    assert within.tolist() == [0, 1, 2, 3]


def test_the_same_bits_in_every_run(device):
    x = clustered(3000, 16).to(device)
    first, second = (codecs.Residual.train(x, seed=3) for _ in range(2))
    assert torch.equal(first.centroids, second.centroids)
    assert torch.equal(first.bucket_weights, second.bucket_weights)
    assert len(first.centroids) == 256  # a power of two, at most one for 8 tokens
    assert not torch.equal(codecs.Residual.train(x, seed=4).centroids, first.centroids)


def test_tokens_that_are_not_normalized(device):
    x = 3 * clustered(2000, 8).to(device)
    codec = codecs.Residual.train(x, 16)
    torch.testing.assert_close(codec.centroids.norm(dim=-1), torch.ones(16, device=device))
    half = codecs.Residual.train(x.half(), 16, normalize=False)
    again = decompress(half, *compress(half, x.half()))
    assert (again - x).norm() < 0.75 * x.norm()


def test_scores_of_what_was_compressed(device):
    x = clustered(900, 32).to(device)
    codec = codecs.Residual.train(x, 64, nbits=4, normalize=True)
    Q = clustered(7, 32).to(device)
    codes = codec.encode([x[:300], x[:0], x[300:]])
    scores = li.maxsim(Q, codes, normalize=True)
    tokens = unit(codec.decode(codes).values)
    wanted = torch.stack([(Q @ part.T).amax(1).sum() for part in (tokens[:300], tokens[300:])])
    torch.testing.assert_close(scores[[0, 2]], wanted, rtol=1e-5, atol=1e-5)
    assert scores[1] == 0


# ---- bad input ----

GOOD = {
    "centroids": torch.eye(4),
    "bucket_cutoffs": torch.tensor([-0.1, 0.0, 0.1]),
    "bucket_weights": torch.tensor([-0.2, -0.05, 0.05, 0.2]),
}


@pytest.mark.parametrize(
    "bad, error, words",
    [
        ({"centroids": [1.0]}, TypeError, "centroids"),
        ({"centroids": torch.eye(4).double()}, TypeError, "float64"),
        ({"centroids": torch.ones(4)}, ValueError, r"centroids must be \[n, d\]"),
        ({"centroids": torch.ones(0, 4)}, ValueError, r"got \[0, 4\]"),
        ({"centroids": torch.full((2, 4), float("nan"))}, ValueError, "centroids must be finite"),
        ({"bucket_cutoffs": torch.zeros(4)}, ValueError, r"bucket_cutoffs must be \[3\] for nbits = 2"),
        ({"bucket_cutoffs": torch.tensor([0.1, 0.0, 0.2])}, ValueError, "must be non-decreasing"),
        ({"bucket_weights": torch.zeros(3)}, ValueError, "bucket_weights must be .* nbits 1, 2, 4 or 8"),
        ({"bucket_weights": torch.zeros(8)}, ValueError, "bucket_weights must be .* nbits 1, 2, 4 or 8"),
        ({"bucket_weights": torch.full((4,), float("inf"))}, ValueError, "bucket_weights must be finite"),
    ],
)
def test_bad_codecs(bad, error, words):
    with pytest.raises(error, match=words):
        codecs.Residual(**{**GOOD, **bad})


@pytest.mark.parametrize(
    "args, error, words",
    [
        ((torch.randn(8, 4), 9), ValueError, "n_centroids must be at most 8, one a token, got 9"),
        ((torch.randn(8, 4), 0), ValueError, "n_centroids must be at least 1, got 0"),
        ((torch.randn(0, 4),), ValueError, "tokens must be at least one"),
        ((torch.randn(2, 8, 4),), ValueError, "tokens must be .*, Tokens or a list, got"),
        ((torch.full((8, 4), float("nan")), 2), ValueError, "tokens must be finite"),
        ((torch.zeros(8, 4, dtype=torch.int32), 2), TypeError, "tokens"),
    ],
)
def test_bad_training(args, error, words):
    with pytest.raises(error, match=words):
        codecs.Residual.train(*args)


def test_bad_tokens_and_codes():
    codec = codecs.Residual(**GOOD)
    with pytest.raises(ValueError, match=r"tokens must be \[N, L, 4\] or \[L, 4\], got \[1, 3, 5\]"):
        codec.encode(torch.ones(3, 5))
    with pytest.raises(ValueError, match="tokens must be finite"):
        codec.encode(torch.full((3, 4), float("inf")))
    codes = codec.encode(torch.eye(4))
    same = Codes(codec, codes.values, centroids=codes.centroids.long())
    assert torch.equal(same.centroids, codes.centroids)
    with pytest.raises(ValueError, match="codes must be of Residual"):
        codecs.Residual.train(sample(), 4).decode(codes)


def test_state(tmp_path):
    codec = codecs.Residual.train(sample(), 8, nbits=4)
    torch.save(codec.state_dict(), tmp_path / "codec.pt")
    again = codecs.Residual.load_state_dict(torch.load(tmp_path / "codec.pt"))
    assert again == codec and again.nbits == 4 and hash(again) == hash(codec)
    assert again != codecs.Residual.train(sample(), 8, nbits=4, seed=1)
    for state in ({}, {**codec.state_dict(), "more": 1}, [1]):
        with pytest.raises(ValueError, match="state must be a dict of centroids, bucket_cutoffs"):
            codecs.Residual.load_state_dict(state)


def test_scores_by_centroids_alone(device):
    codec = codecs.Residual.train(sample().to(device), 8)
    documents = [x.to(device) for x in sample().split([5, 0, 1, 94, 200])]
    Q = sample(12).to(device).view(3, 4, 8)
    packed = codec.encode(documents)
    padded = packed.to_padded()
    holes = Codes(codec, padded.values.flip(1), centroids=padded.centroids.flip(1), mask=padded.mask.flip(1))
    tokens = [codec.centroids[own.centroids.long()] for own in packed]
    wanted = li.maxsim(Q, tokens)
    for codes in (packed, padded, holes):
        scores = codec.centroid_scores(Q, codes)
        torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(codec.centroid_scores(Q[1], codes), scores[1])
    assert codec.centroid_scores(Q[:0].double(), packed).shape == (0, 5)
    with pytest.raises(ValueError, match=r"Q must be \[Nq, Lq, 8\]"):
        codec.centroid_scores(Q[..., :7], packed)
    with pytest.raises(TypeError, match=r"codes must be late_interaction.Codes"):
        codec.centroid_scores(Q, documents)


# ---- numbers at their bounds ----


def sample(tokens=300, d=8):
    return torch.randn(tokens, d, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("seed", [-(1 << 63), (1 << 64) - 1, 1 << 63])
def test_seeds_that_pytorch_takes(seed):
    codec = codecs.Residual.train(sample(), 8, seed=seed)
    assert torch.equal(codec.centroids, codecs.Residual.train(sample(), 8, seed=seed).centroids)


def test_normalized_samples_have_the_length_1():
    tokens = sample() * torch.rand(300, 1).add(0.001)
    tokens[7] = 0.0
    unit = torch.nn.functional.normalize(tokens, dim=-1)
    codec, same = (
        codecs.Residual.train(tokens, 8, normalize=True),
        codecs.Residual.train(unit, 8, normalize=False),
    )
    torch.testing.assert_close(codec.centroids, same.centroids, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(codec.bucket_weights, same.bucket_weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(codec.centroids.norm(dim=-1), torch.ones(8), rtol=1e-5, atol=1e-5)


def test_samples_in_every_form():
    """What a mask leaves out is no part of the sample."""
    mask = torch.arange(100) < torch.tensor([[90], [100]])
    masked = li.Tokens(sample(200).view(2, 100, 8).masked_fill(~mask[..., None], torch.nan), mask)
    codec = codecs.Residual.train(masked, 8)
    assert codec == codecs.Residual.train(masked.pack().values, 8) == codecs.Residual.train(list(masked), 8)


@pytest.mark.parametrize("dtype", ["float32", torch.float64, None])
def test_dtypes_of_no_centroid(dtype):
    with pytest.raises(TypeError, match="dtype must be torch"):
        codecs.Residual.train(sample(), 8, dtype=dtype)


def test_a_codec_on_its_device_is_itself():
    codec = codecs.Residual.train(sample(), 8)
    assert codec.to("cpu") is codec


def test_centroids_of_short_tokens_and_of_opposite_ones():
    """Sums of tokens are normalized, whatever their norm; of those that cancel out remains 0."""
    codec = codecs.Residual.train(sample() * 1e-3, 8, normalize=False)
    torch.testing.assert_close(codec.centroids.norm(dim=-1), torch.ones(8), rtol=1e-5, atol=1e-5)
    x = torch.tensor([[3.0, 4.0], [-3.0, -4.0]])
    assert codecs.Residual.train(x, 1, normalize=False).centroids.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("tokens, count", [(1, 1), (15, 1), (16, 2), (32, 4), (100, 8), (5000, 512)])
def test_how_many_centroids_there_are_by_themselves(tokens, count):
    """A power of 2 of at most an eighth of the tokens."""
    assert len(codecs.Residual.train(sample(tokens), iterations=1).centroids) == count
