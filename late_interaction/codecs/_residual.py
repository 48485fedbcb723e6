"""The codec of centroids and residuals of a few bits: :class:`Residual`."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_flag
from late_interaction._checks.plaid import INTEGERS, as_codes, check_codebook
from late_interaction._checks.tensors import (
    check_device,
    check_integers,
    check_no_forward_ad,
    check_rows,
    has_values_on_cpu,
    scores_dtype,
)  # fmt: skip
from late_interaction._scoring import quantized
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.sequences import _Packed
from late_interaction._torch import pytree
from late_interaction.codecs._codec import Codec
from late_interaction.codecs._k_means import BLOCK, check_training, finite, nearest, rows_of, trained
from late_interaction.codes import Codes
from late_interaction.tokens import Tokens, TokensLike

_STATE = ("centroids", "bucket_cutoffs", "bucket_weights")


class Residual(Codec):
    """Store tokens as ColBERTv2 and PLAID do: the nearest centroid, and a bucket for the rest of each dim.

    See https://arxiv.org/abs/2112.01488 and https://arxiv.org/abs/2205.09707. The centroid is that with the
    largest inner product, the lowest of equals; there are ``2**nbits`` buckets. With 2 bits and d = 128 a
    token takes 36 bytes instead of 256 in float16.

    :meth:`train` finds centroids and buckets for a sample of tokens; this makes a codec of those of an index.
    A byte of values holds the buckets of ``8 / nbits`` neighbouring dims, the first in its lowest bits.
    (Index files of ColBERTv2 and fast-plaid fill a byte from its highest bit down: :func:`reverse_bits`.)

    GPUs decode tokens in registers, CPUs into a buffer in their caches. A token, ``centroids[index] +
    bucket_weights[buckets]``, is rounded to the dtype of the queries, and multiplies in it; float32 follows
    ``precision``, autocast and ``torch.get_float32_matmul_precision()``, as in
    :func:`late_interaction.maxsim`. ``normalize`` divides decoded tokens by their norms, too. Scores send
    gradients to the queries alone, the same bits in every run. On a GPU documents are read once for every 64
    query tokens (32 with a gradient). Padded documents with a mask are packed for each call.

    Args:
        centroids: ``[n, d]``; float32, float16 or bfloat16. Scores convert them on every call with queries of
            another dtype.
        bucket_cutoffs: ``[2**nbits - 1]``, non-decreasing: where one bucket ends and the next begins.
        bucket_weights: ``[2**nbits]``: what a residual in each bucket becomes. ``nbits`` is 1, 2, 4 or 8.

    Attributes:
        centroids, bucket_cutoffs, bucket_weights: as given; cutoffs and weights in float32.
        nbits: the bits of a dim.
        d: the dims of a token, whose residual has ``ceil(d * nbits / 8)`` bytes.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value; from :meth:`encode`
            also tokens that are not finite, and from scores ``maxsim_pairs``, which has no kernel.

    Example:
        >>> import torch
        >>> import late_interaction as li
        >>> codec = li.codecs.Residual(
        ...     torch.eye(2), torch.tensor([-0.1, 0.0, 0.1]), torch.tensor([-0.2, -0.05, 0.05, 0.2]))
        >>> codes = codec.encode([torch.tensor([[0.95, 0.2], [0.1, 1.0]])])
        >>> codes.centroids, codes.values
        (tensor([0, 1], dtype=torch.int32), tensor([[13],
                [ 6]], dtype=torch.uint8))
        >>> codec.decode(codes)[0]
        tensor([[0.9500, 0.2000],
                [0.0500, 0.9500]])
        >>> li.maxsim(torch.tensor([[1.0, 0.0]]), codes)
        tensor([0.9500])
    """

    def __init__(self, centroids: Tensor, bucket_cutoffs: Tensor, bucket_weights: Tensor) -> None:
        check_codebook(centroids, bucket_cutoffs, bucket_weights)
        buckets = (x.detach().to(torch.float32) for x in (bucket_cutoffs, bucket_weights))
        self._set(centroids.detach().contiguous(), *buckets)

    def _set(self, centroids: Tensor, bucket_cutoffs: Tensor, bucket_weights: Tensor) -> None:
        self.centroids, self.bucket_cutoffs, self.bucket_weights = centroids, bucket_cutoffs, bucket_weights

    @classmethod
    def _made(cls, *state: Any) -> "Residual":
        """Make one of checked tensors (or of what a pytree has in their place)."""
        made = cls.__new__(cls)
        made._set(*state)
        return made

    @property
    def nbits(self) -> int:
        return self.bucket_weights.shape[0].bit_length() - 1

    @property
    def d(self) -> int:
        return self.centroids.shape[1]

    def __repr__(self) -> str:
        n, d = self.centroids.shape
        return f"Residual({n} centroids, d={d}, nbits={self.nbits}, {self.centroids.dtype})"

    def to(self, device: torch.device | str) -> "Residual":
        """Give the codec with its tensors on a device: this one, if they are there already."""
        if self.centroids.to(device) is self.centroids:
            return self
        return Residual._made(*(x.to(device) for x in self.state_dict().values()))

    def state_dict(self) -> dict[str, Tensor]:
        """Give the tensors by the names of the arguments, for ``torch.save``."""
        return {name: getattr(self, name) for name in _STATE}

    @classmethod
    def load_state_dict(cls, state: dict[str, Tensor]) -> "Residual":
        """Make a codec of what :meth:`state_dict` gave. Codecs do not change, for codes refer to them.

        Raises:
            TypeError, ValueError: tensors that are missing, or as the class.

        Example:
            >>> import torch
            >>> from late_interaction import codecs
            >>> codec = codecs.Residual.train(torch.randn(100, 8), 4)
            >>> codecs.Residual.load_state_dict(codec.state_dict()) == codec
            True
        """
        if not isinstance(state, dict) or set(state) != set(_STATE):
            got = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"state must be a dict of {', '.join(_STATE)}, got {abbreviate(got)}")
        return cls(**state)

    @classmethod
    def train(
        cls,
        tokens: TokensLike,
        n_centroids: int | None = None,
        *,
        nbits: int = 2,
        normalize: bool = False,
        iterations: int = 10,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> "Residual":
        """Find centroids by spherical k-means, and buckets that the sample's residuals fill equally.

        A token belongs to the centroid with the largest inner product, as when it is encoded. The sum of
        a centroid's tokens, normalized, is the next centroid; one without tokens moves to a token that is far
        from its own. The same input on the same kind of device gives the same bits.

        Args:
            tokens: a sample of the corpus: ``[tokens, d]``, or Tokens or a list as for :meth:`encode`.
            n_centroids: how many; at most as many as tokens. None: the power of two below ``16 *
                sqrt(tokens)``, as ColBERTv2 chooses for a corpus of so many tokens, but at most one for 8
                tokens of the sample. For a sample of a larger corpus name it.
            nbits: 1, 2, 4 or 8 bits a dim.
            normalize: L2-normalize tokens first, where the corpus normalizes before it stores them.
            iterations: of k-means. It stops before where nothing changes any more.
            seed: of the choice of the first centroids among the tokens.
            dtype: of the centroids: float32, float16 or bfloat16. With 2 bytes a GPU searches a corpus of
                2-bit codes of 128 dims without decoding it.

        Returns:
            The codec, on the device of the tokens.

        Raises:
            TypeError, ValueError: an argument of a wrong kind, dtype, shape or value; tokens that are not
                finite, or fewer than ``n_centroids``.

        Complexity: ``2 * tokens * n_centroids * d`` operations an iteration, by MaxSim's kernels. Memory
            beside the tokens in float32: an int32 a token and two times the centroids.

        Example:
            >>> import torch
            >>> from late_interaction import codecs
            >>> codec = codecs.Residual.train(torch.randn(1000, 16), 32, nbits=4)
            >>> codec
            Residual(32 centroids, d=16, nbits=4, torch.float32)
        """
        check_flag("normalize", normalize)
        options = check_training(nbits, iterations, seed, dtype)
        with torch.no_grad():
            sample = finite(rows_of(tokens))
            if normalize:
                sample = torch.nn.functional.normalize(sample, dim=-1, eps=1e-12)
            else:
                look("codecs.Residual.train", sample, called="the sample")
            return cls(*trained(sample, n_centroids, *options))

    def centroid_scores(self, Q: Tensor, codes: Codes) -> Tensor:
        """Score documents with every token replaced by its centroid: PLAID's pruning step, without gradients.

        ``score[i, j] = sum_s max_t <Q[i, s], centroids[index[j, t]]>``, without the gathered products.

        Args:
            Q: ``[Nq, Lq, d]`` or ``[Lq, d]``, floating-point, on the device of the codec.
            codes: documents that this codec encoded. Packed ones are padded; with a mask they are packed
                before, which waits for a GPU.

        Returns:
            ``[Nq, Nd]`` scores (``[Nd]`` for a 2-D ``Q``), float32 (float64 for float64 ``Q``).

        Raises:
            TypeError, ValueError: arguments that do not fit, or a ``Q`` that wants a gradient.

        Example:
            >>> import torch
            >>> from late_interaction import codecs
            >>> codec = codecs.Residual(torch.eye(2), torch.zeros(1), torch.tensor([-0.1, 0.1]))
            >>> codes = codec.encode([torch.eye(2), 0.9 * torch.eye(2)[1:]])
            >>> codec.centroid_scores(torch.tensor([[0.6, 0.8]]), codes)
            tensor([0.8000, 0.8000])
        """
        check_rows("Q", Q)
        self._check_own("codes", codes)
        if Q.dim() not in (2, 3) or Q.shape[-1] != self.d:
            raise ValueError(f"Q must be [Nq, Lq, {self.d}] or [Lq, {self.d}], got {shape_of(Q)}")
        codes = (codes if codes.mask is None else codes.pack()).to_padded()
        index, lengths = codes.centroids, codes.lengths
        centroids = self.centroids.to(Q.dtype)
        queries = Q.unsqueeze(0) if Q.dim() == 2 else Q
        scores = [quantized.approximate(centroids @ q.mT, index, lengths) for q in queries]
        found = torch.stack(scores) if scores else Q.new_empty((0, len(codes)), dtype=scores_dtype(Q))
        return found.squeeze(0) if Q.dim() == 2 else found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Residual):
            return False
        state = zip(self.state_dict().values(), other.state_dict().values(), strict=True)
        return self is other or all(
            x is y or (x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)) for x, y in state
        )

    def __hash__(self) -> int:
        return hash((type(self), *self.centroids.shape, self.nbits))

    # ---- as codecs have it ----

    def _options(self) -> dict[str, Any]:
        return {"shape": self.centroids.shape, "nbits": self.nbits}  # to compare values is to wait for a GPU

    def width(self, d: int) -> int:
        return (d * self.nbits + 7) // 8

    def _dims(self, width: int) -> int:
        return self.d

    def _checked_scales(self, values: Tensor, scales: Any) -> None:
        if scales is not None:
            raise ValueError(f"scales must be None for {self}, got {abbreviate(scales)}")

    def _checked_centroids(self, values: Tensor, centroids: Any) -> Tensor:
        shape = list(values.shape[:-1])
        check_device("values", values, "the codec", self.centroids.device)
        check_integers("centroids", centroids, len(shape), str(shape), "values", values.device, INTEGERS)
        if list(centroids.shape) != shape or len(shape) > 2:
            raise ValueError(
                f"centroids must be {shape}, one a token of [N, L, bytes] or [tokens, bytes], got"
                f" {shape_of(centroids)}"
            )
        n = len(self.centroids)
        if has_values_on_cpu(centroids) and centroids.numel():
            least, most = int(centroids.min()), int(centroids.max())
            if least < 0 or most >= n:
                raise ValueError(f"centroids must all be >= 0 and < {n}, got {least} to {most}")
        return as_codes(centroids)

    def _encoded(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, None, Tensor]:
        check_device("tokens", x, "the codec", self.centroids.device)
        if x.shape[-1] != self.d or x.dim() > 3:
            raise ValueError(f"tokens must be [N, L, {self.d}] or [L, {self.d}], got {shape_of(x)}")
        rows = (x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)).flatten(0, -2)
        index = torch.empty(rows.shape[:1], dtype=torch.int32, device=x.device)
        values = torch.empty(len(rows), self.width(self.d), dtype=torch.uint8, device=x.device)
        centroids = self.centroids.to(torch.float32)
        for first in range(0, len(rows), BLOCK):
            own = slice(first, first + BLOCK)
            some = finite(rows[own])
            index[own] = nearest(some, centroids)[0]
            rest = some - centroids.index_select(0, index[own])
            values[own] = self._packed(torch.bucketize(rest, self.bucket_cutoffs, out_int32=True))
        return values.view(*x.shape[:-1], self.width(self.d)), None, index.view(x.shape[:-1])

    def _packed(self, buckets: Tensor) -> Tensor:
        each = 8 // self.nbits
        padded = torch.nn.functional.pad(buckets, (0, self.width(self.d) * each - self.d))
        shifts = torch.arange(0, 8, self.nbits, dtype=torch.int32, device=buckets.device)
        return (padded.view(len(buckets), self.width(self.d), each) << shifts).sum(-1).to(torch.uint8)

    def _decoded(self, codes: Codes) -> Tensor:
        assert codes.centroids is not None
        index, n = codes.centroids.flatten(), len(self.centroids)
        shifts = torch.arange(0, 8, self.nbits, device=index.device)
        bytes_ = torch.arange(256, device=index.device).unsqueeze(1)
        weights = self.bucket_weights[(bytes_ >> shifts) & (2**self.nbits - 1)]  # of each byte
        rest = weights.index_select(0, codes.values.flatten().int())
        rest = rest.view(len(index), self.width(self.d) * len(shifts))[:, : self.d]
        index = torch.where((index >= 0) & (index < n), index, 0)
        tokens: Tensor = self.centroids.to(torch.float32).index_select(0, index) + rest
        return tokens.view(*codes.values.shape[:-1], self.d)

    def _met(self, q: Tokens, normalize: bool, precision: Any) -> Tokens:
        return q

    def _score(self, q: Tokens | Codes, D: Codes, paired: bool, normalize: bool, precision: Any) -> Tensor:
        if not isinstance(q, Tokens):
            raise TypeError(f"Q must be embeddings for D of {self}, got {q}")
        if paired:
            raise ValueError(f"maxsim_pairs has no kernel for D of {self}: decode them")
        check_no_forward_ad("maxsim", q.values)
        assert D.centroids is not None
        # Zeros have similarities and maxima of 0, normalized or not.
        Q = q.values if q.mask is None else q.values.masked_fill(~q.mask.unsqueeze(-1), 0.0)
        index, values, extents = D.centroids, D.values, D.offsets
        if extents is None and D.mask is None:
            extents = D.lengths
        elif extents is None:
            packed = _Packed.of(Tokens._made(values, D.mask))
            index, values, extents = packed.chosen(index.flatten()), packed.values, packed.offsets
        codebook = self.centroids, self.bucket_weights, self.nbits
        return quantized.score((Q, index, values, extents, *codebook), normalize, precision)


pytree.register_pytree_node(
    Residual,
    lambda codec: (list(codec.state_dict().values()), None),
    lambda state, _: Residual._made(*state),
    serialized_type_name="late_interaction.codecs.Residual",
    flatten_with_keys_fn=lambda codec: (
        [(pytree.GetAttrKey(name), x) for name, x in codec.state_dict().items()],
        None,
    ),
    to_dumpable_context=lambda _: None,
    from_dumpable_context=lambda _: None,
)
torch.serialization.add_safe_globals([Residual])
