"""Compression of tokens to a centroid and a residual of a few bits: :class:`ResidualCodec`."""

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_flag, check_positive, check_seed
from late_interaction._checks.plaid import check_nbits
from late_interaction._checks.tensors import check_embeddings, check_not_meta
from late_interaction._scoring.norm_warning import look
from late_interaction.ops.winners import widen

__all__ = ["ResidualCodec"]

# Tokens meet the centroids as queries of _QUERY, and are compressed _BLOCK at a time.
_QUERY, _BLOCK = 512, 1 << 16
# Buckets are quantiles of at most this many residuals.
_SAMPLE = 1 << 22


class ResidualCodec:
    """Tokens as ColBERTv2 and PLAID store them (https://arxiv.org/abs/2112.01488,
    https://arxiv.org/abs/2205.09707): the index of a centroid, and for each dim the bucket, of ``2**nbits``,
    that the rest falls into. With 2 bits and d = 128 a token takes 36 bytes instead of 256 in float16.

    :meth:`train` finds the centroids and buckets for a sample of tokens. What is compressed is scored as it
    is by :func:`late_interaction.plaid.maxsim_residual` and its siblings, and stored by
    :class:`late_interaction.Corpus`.

    Args:
        centroids: ``[n, d]``; float32, float16 or bfloat16.
        bucket_cutoffs: ``[2**nbits - 1]``, rising: where one bucket ends and the next begins.
        bucket_weights: ``[2**nbits]``: what a residual in each bucket becomes.
        nbits: 1, 2, 4 or 8.

    Attributes:
        centroids, bucket_cutoffs, bucket_weights, nbits: as given; cutoffs and weights in float32.
        d: the dims of a token.
        bytes: the bytes of a token's residual, ``ceil(d * nbits / 8)``.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value.

    Example:
        >>> import torch
        >>> from late_interaction.residual_codec import ResidualCodec
        >>> codec = ResidualCodec(
        ...     torch.eye(2), torch.tensor([-0.1, 0.0, 0.1]), torch.tensor([-0.2, -0.05, 0.05, 0.2]), nbits=2)
        >>> codes, residuals = codec.compress(torch.tensor([[0.95, 0.2], [0.1, 1.0]]))
        >>> codes, residuals
        (tensor([0, 1], dtype=torch.int32), tensor([[13],
                [ 6]], dtype=torch.uint8))
        >>> codec.decompress(codes, residuals)
        tensor([[0.9500, 0.2000],
                [0.0500, 0.9500]])
    """

    def __init__(self, centroids: Tensor, bucket_cutoffs: Tensor, bucket_weights: Tensor, nbits: int) -> None:
        check_nbits(nbits)
        _check_centroids(centroids)
        _check_buckets("bucket_cutoffs", bucket_cutoffs, 2**nbits - 1, nbits, centroids.device)
        _check_buckets("bucket_weights", bucket_weights, 2**nbits, nbits, centroids.device)
        if bool((bucket_cutoffs[1:] < bucket_cutoffs[:-1]).any()):
            raise ValueError(f"bucket_cutoffs must not decrease, got {abbreviate(bucket_cutoffs.tolist())}")
        self.centroids = centroids.detach().contiguous()
        self.bucket_cutoffs = bucket_cutoffs.detach().to(torch.float32)
        self.bucket_weights = bucket_weights.detach().to(torch.float32)
        self.nbits = nbits
        self.d: int = centroids.shape[1]
        self.bytes = (self.d * nbits + 7) // 8

    def __repr__(self) -> str:
        n, d = self.centroids.shape
        return f"ResidualCodec({n} centroids, d={d}, nbits={self.nbits}, {self.centroids.dtype})"

    def to(self, device: torch.device | str) -> "ResidualCodec":
        """The codec on a device.

        Args:
            device: as in ``torch.Tensor.to``.

        Returns:
            A codec whose tensors are there; this one, if they are there already.

        Example:
            >>> import torch
            >>> from late_interaction.residual_codec import ResidualCodec
            >>> codec = ResidualCodec(torch.eye(2), torch.zeros(1), torch.tensor([-0.1, 0.1]), nbits=1)
            >>> codec.to("cpu") is codec
            True
        """
        device = torch.device(device)
        if self.centroids.to(device) is self.centroids:
            return self
        buckets = self.bucket_cutoffs.to(device), self.bucket_weights.to(device)
        return ResidualCodec(self.centroids.to(device), *buckets, self.nbits)

    @classmethod
    def train(
        cls,
        tokens: Tensor,
        n_centroids: int | None = None,
        *,
        nbits: int = 2,
        normalize: bool = False,
        iterations: int = 10,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> "ResidualCodec":
        """Centroids by spherical k-means, and buckets that the sample's residuals fill equally.

        A token belongs to the centroid with the largest inner product, as when it is compressed. The sum of
        a centroid's tokens, normalized, is the next centroid; one without tokens moves to a token that is far
        from its own. The same input on the same kind of device gives the same bits.

        Args:
            tokens: ``[tokens, d]``, a sample of the corpus.
            n_centroids: how many; at most as many as tokens. None: the power of two below ``16 *
                sqrt(tokens)``, as ColBERTv2 chooses for a corpus of so many tokens, but at most one for 8
                tokens of the sample. For a sample of a larger corpus name it.
            nbits: 1, 2, 4 or 8 bits a dim.
            normalize: L2-normalize tokens first, where the corpus normalizes before it stores them.
            iterations: of k-means. It stops before where nothing changes any more.
            seed: of the choice of the first centroids among the tokens.
            dtype: of the centroids: float32, float16 or bfloat16.

        Returns:
            The codec, on the device of the tokens.

        Raises:
            TypeError, ValueError: an argument of a wrong kind, dtype, shape or value; tokens that are not
                finite, or fewer than ``n_centroids``.

        Complexity: ``2 * tokens * n_centroids * d`` operations an iteration, by MaxSim's kernels. Memory
            beside the tokens in float32: an int32 a token and two times the centroids.

        Example:
            >>> import torch
            >>> from late_interaction.residual_codec import ResidualCodec
            >>> codec = ResidualCodec.train(torch.randn(1000, 16), 32, nbits=4)
            >>> codec
            ResidualCodec(32 centroids, d=16, nbits=4, torch.float32)
        """
        check_nbits(nbits)
        check_flag("normalize", normalize)
        check_positive("iterations", iterations)
        seed = check_seed(seed)
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f"dtype must be torch.float32, torch.float16 or torch.bfloat16, got {abbreviate(dtype)}"
            )
        with torch.no_grad():
            tokens = _checked(tokens, None)
            if normalize:
                tokens = torch.nn.functional.normalize(tokens, dim=-1, eps=1e-12)
            else:
                look("ResidualCodec.train", tokens, called="the sample")
            if n_centroids is None:
                n_centroids = _default_count(len(tokens))
            check_positive("n_centroids", n_centroids)
            if n_centroids > len(tokens):
                raise ValueError(f"n_centroids must be at most {len(tokens)}, one a token, got {n_centroids}")
            centroids = _spherical_k_means(tokens, n_centroids, iterations, seed).to(dtype)
            codes = _nearest(tokens, centroids.to(torch.float32))[0]
            return cls(centroids, *_buckets(tokens, codes, centroids, nbits), nbits)

    def compress(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The code and the residual of each token.

        Args:
            tokens: ``[tokens, d]``, floating-point, on the device of the codec; normalized, if the tokens
                that it was trained with were.

        Returns:
            ``(codes, residuals)``: int32 ``[tokens]``, the centroid with the largest inner product, the
            lowest of equals; and uint8 ``[tokens, bytes]``, the buckets of ``8 / nbits`` neighbouring dims in
            a byte, the first in its lowest bits.

        Raises:
            TypeError, ValueError: tokens of a wrong dtype, shape or device, or that are not finite.

        Complexity: ``2 * tokens * n * d`` operations. Memory beside the result: some 2^16 tokens in float32.

        Example: see the class.
        """
        check_embeddings("tokens", tokens)
        if tokens.device != self.centroids.device:
            raise ValueError(
                f"tokens must be on the device of the codec, {self.centroids.device}, got {tokens.device}"
            )
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be [tokens, {self.d}], got {shape_of(tokens)}")
        codes = torch.empty(tokens.shape[:1], dtype=torch.int32, device=tokens.device)
        residuals = torch.empty(len(codes), self.bytes, dtype=torch.uint8, device=tokens.device)
        centroids = self.centroids.to(torch.float32)
        with torch.no_grad():
            for first in range(0, len(tokens), _BLOCK):
                own = slice(first, first + _BLOCK)
                some = _checked(tokens[own], self.d)
                codes[own] = _nearest(some, centroids)[0]
                rest = some - centroids.index_select(0, codes[own])
                residuals[own] = self._packed(torch.bucketize(rest, self.bucket_cutoffs, out_int32=True))
        return codes, residuals

    def decompress(self, codes: Tensor, residuals: Tensor) -> Tensor:
        """The tokens that codes and residuals stand for.

        Args:
            codes: int32 ``[tokens]``, from :meth:`compress`.
            residuals: uint8 ``[tokens, bytes]``, of the same tokens.

        Returns:
            ``[tokens, d]``, float32.

        Raises:
            TypeError, ValueError: tensors of another dtype or shape; a code that no centroid has.

        Example: see the class.
        """
        for name, x, dtype in (("codes", codes, torch.int32), ("residuals", residuals, torch.uint8)):
            if not isinstance(x, Tensor) or x.dtype != dtype:
                raise TypeError(f"{name} must be a {dtype} tensor, got {abbreviate(getattr(x, 'dtype', x))}")
        if codes.dim() != 1 or residuals.shape != (len(codes), self.bytes):
            raise ValueError(
                f"codes and residuals must be [tokens] and [tokens, {self.bytes}], got {shape_of(codes)} and"
                f" {shape_of(residuals)}"
            )
        check_not_meta("codes", codes)
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < len(self.centroids):
            raise ValueError(f"codes must all be >= 0 and < {len(self.centroids)}")
        shifts = torch.arange(0, 8, self.nbits, device=codes.device)
        bytes_ = torch.arange(256, device=codes.device).unsqueeze(1)
        values = self.bucket_weights[(bytes_ >> shifts) & (2**self.nbits - 1)]  # of each byte
        rest = values.index_select(0, residuals.flatten().int()).view(len(codes), self._buckets)[:, : self.d]
        return self.centroids.to(torch.float32).index_select(0, codes) + rest

    @property
    def _buckets(self) -> int:
        """The buckets that a token's bytes hold, with those past d."""
        return self.bytes * (8 // self.nbits)

    def _packed(self, buckets: Tensor) -> Tensor:
        a_byte = 8 // self.nbits
        padded = torch.nn.functional.pad(buckets, (0, self._buckets - self.d))
        shifts = torch.arange(0, 8, self.nbits, dtype=torch.int32, device=buckets.device)
        return (padded.view(len(buckets), self.bytes, a_byte) << shifts).sum(-1).to(torch.uint8)


def _check_centroids(centroids: Tensor) -> None:
    check_embeddings("centroids", centroids)
    if centroids.dtype == torch.float64:
        raise TypeError("centroids must be float32, float16 or bfloat16, got torch.float64")
    if centroids.dim() != 2 or not centroids.numel() or len(centroids) >= 2**31:
        raise ValueError(f"centroids must be [n, d] with at least one row, got {shape_of(centroids)}")
    check_not_meta("centroids", centroids)
    if not bool(centroids.isfinite().all()):
        raise ValueError("centroids must be finite, got NaN or an infinity")


def _check_buckets(name: str, x: Tensor, size: int, nbits: int, device: torch.device) -> None:
    check_embeddings(name, x)
    if x.shape != (size,) or x.device != device:
        raise ValueError(
            f"{name} must be [{size}] for nbits = {nbits}, on the device of centroids, {device}, got"
            f" {shape_of(x)} on {x.device}"
        )
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {abbreviate(x.tolist())}")


def _checked(tokens: Tensor, d: int | None) -> Tensor:
    """Tokens [tokens, d] in float32, all of them finite."""
    check_embeddings("tokens", tokens)
    if tokens.dim() != 2 or not tokens.shape[1] or tokens.shape[1] != (d or tokens.shape[1]):
        raise ValueError(f"tokens must be [tokens, {d or 'd'}], got {shape_of(tokens)}")
    check_not_meta("tokens", tokens)
    floats = tokens.detach().to(torch.float32)
    if not bool(floats.isfinite().all()):
        raise ValueError("tokens must be finite in float32, got NaN or an infinity")
    return floats


def _default_count(tokens: int) -> int:
    if not tokens:
        raise ValueError("tokens must be at least one, got none")
    wanted = min(16 * tokens**0.5, max(tokens / 8, 1))
    return 1 << (int(wanted).bit_length() - 1)


def _queries(tokens: Tensor) -> list[Tensor]:
    """Tokens as queries [queries, tokens, d] of MaxSim, in order."""
    whole = len(tokens) // _QUERY * _QUERY
    parts = tokens[:whole].view(-1, _QUERY, tokens.shape[1]), tokens[whole:].unsqueeze(0)
    return [part for part in parts if part.numel()]


def _nearest(tokens: Tensor, centroids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The centroid with the largest inner product with each token, int32, found as the document token that
    wins a query token; and the winners of each of the queries."""
    kept = [ops.maxsim_winners(part, centroids.unsqueeze(0), None, None)[1] for part in _queries(tokens)]
    codes = [widen(winners, len(centroids)).flatten() for winners in kept]
    return (torch.cat(codes) if codes else tokens.new_empty(0, dtype=torch.int32)), kept


def _sums(tokens: Tensor, centroids: Tensor, kept: list[Tensor]) -> Tensor:
    """The sum of each centroid's tokens: the gradient of MaxSim's document, in an order that is fixed."""
    total = torch.zeros_like(centroids)
    for part, winners in zip(_queries(tokens), kept, strict=True):
        ones = torch.ones(winners.shape[:2], dtype=torch.float32, device=tokens.device)
        total += ops.maxsim_backward(ones, part, centroids.unsqueeze(0), winners, need_grad_Q=False)[1][0]
    return total


def _spherical_k_means(tokens: Tensor, count: int, iterations: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    first = torch.randperm(len(tokens), generator=generator, device="cpu")[:count].sort().values
    centroids, before = tokens[first.to(tokens.device)], None
    for _ in range(iterations):
        codes, kept = _nearest(tokens, centroids)
        if before is not None and torch.equal(codes, before):
            break
        before = codes
        following = torch.nn.functional.normalize(_sums(tokens, centroids, kept), dim=-1, eps=1e-12)
        empty = torch.bincount(codes, minlength=count) == 0
        if bool(empty.any()):
            following[empty] = tokens[_farthest(tokens, centroids, codes, int(empty.sum()))]
        centroids = following
    return centroids


def _farthest(tokens: Tensor, centroids: Tensor, codes: Tensor, count: int) -> Tensor:
    """The tokens with the smallest inner products with their own centroids, the lowest of equals first."""
    similarity = torch.cat(
        [
            torch.linalg.vecdot(some, centroids.index_select(0, own))
            for some, own in zip(tokens.split(_BLOCK), codes.split(_BLOCK), strict=True)
        ]
    )
    return similarity.sort(stable=True).indices[:count]


def _buckets(tokens: Tensor, codes: Tensor, centroids: Tensor, nbits: int) -> tuple[Tensor, Tensor]:
    """Cutoffs that share the residuals out equally, and the median of each bucket."""
    every = max(tokens.numel() // _SAMPLE, 1)
    rest = tokens[::every] - centroids.index_select(0, codes[::every]).to(torch.float32)
    values = rest.flatten().sort().values
    at = torch.arange(1, 2 ** (nbits + 1), dtype=torch.float32, device=tokens.device)
    quantiles = values[(at / 2 ** (nbits + 1) * (len(values) - 1)).round().to(torch.int64)]
    return quantiles[1::2].contiguous(), quantiles[::2].contiguous()
