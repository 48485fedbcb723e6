"""What every public function asks of its arguments, before any operator runs.

TypeError: an argument of the wrong kind or dtype. ValueError: a shape, device or value that does not fit.
The message names the argument, what came, and what is wanted.
"""

import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch.autograd import forward_ad

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BACKWARDS = ("auto", "unified", "lowmem")
WINNERS = ("save", "recompute")
PRECISIONS = ("highest", "high", "medium")


def _bad_tokens(name: str, x: Any, wanted: tuple[torch.dtype, ...] = FLOATS) -> NoReturn:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{name} must be a dense (strided) tensor, got a {kind} one")
    *others, last = (str(dtype).removeprefix("torch.") for dtype in wanted)
    raise TypeError(f"{name} must be {', '.join(others)}{' or ' * bool(others)}{last}, got {x.dtype}")


def embeddings(name: str, x: Tensor) -> None:
    """A dense floating-point tensor of a dtype that the kernels know."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.layout != torch.strided or x.is_nested:
        _bad_tokens(name, x)


def rows(name: str, x: Tensor) -> None:
    """Embeddings with a dim d of at least 1."""
    embeddings(name, x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} must be [..., d] with d of at least 1, got {_shape(x)}")


def autocasting(x: Tensor) -> bool:
    kind = x.device.type  # PyTorch has no autocast for meta
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def has_values(x: Tensor) -> bool:
    """Whether x holds values that can be read: not while a graph is traced, not of fake or meta tensors."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    if _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None:
        return False
    return type(x) in (Tensor, torch.nn.Parameter) or not _is_fake(x)


def _is_fake(x: Tensor) -> bool:
    from torch._subclasses.fake_tensor import is_fake  # slow to import

    return bool(is_fake(x))


def _require_size(holds: Any, message: Callable[[], str]) -> None:
    """A ValueError unless a condition on sizes holds. Of sizes that depend on data the traced graph asserts
    it."""
    if holds is True:  # of sizes that are plain numbers
        return
    if torch.compiler.is_compiling():
        torch._check(holds)
    elif not isinstance(holds, bool):
        torch._check(holds, message)
    elif not holds:
        raise ValueError(message())


def together(Q: Tensor, D: Tensor) -> None:
    """Q and D of one dtype (autocast aside), one device and one d."""
    if Q.device != D.device:
        raise ValueError(f"Q and D must be on the same device, got {Q.device} and {D.device}")
    alike(Q, D)


def alike(Q: Tensor, D: Tensor) -> None:
    """Q and D of one dtype (autocast aside) and one d."""
    if Q.dtype != D.dtype and not (autocasting(Q) and torch.float64 not in (Q.dtype, D.dtype)):
        raise TypeError(f"Q and D must share a dtype, got {Q.dtype} and {D.dtype}")
    d = Q.shape[-1]
    if d != D.shape[-1]:
        raise ValueError(
            f"Q and D must share the embedding dim d (their last), got {_shape(Q)} and {_shape(D)}"
        )
    if d == 0:
        raise ValueError(f"Q and D need an embedding dim d of at least 1, got {_shape(Q)} and {_shape(D)}")


def mask(name: str, m: Tensor | None, tokens_name: str, tokens: Tensor) -> Tensor | None:
    """A bool mask of the tokens' shape without d. Integers count as bool; a 1-D mask fits a batch of one."""
    if m is None:
        return None
    if not isinstance(m, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(m).__name__}")
    if m.dtype not in MASK_DTYPES or m.layout != torch.strided:
        raise TypeError(f"{name} must be a dense bool (or integer) tensor, got {m.dtype}, {m.layout}")
    if m.device != tokens.device:
        raise ValueError(f"{name} must be on the device of {tokens_name}, {tokens.device}, got {m.device}")
    fitted = m.unsqueeze(0) if m.dim() == 1 else m
    if fitted.shape != tokens.shape[:-1]:
        raise ValueError(
            f"{name} must be {list(tokens.shape[:-1])}, the shape of {tokens_name} without d, got {_shape(m)}"
        )
    return fitted if fitted.dtype == torch.bool else fitted != 0


def batched(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Everything a call of maxsim must satisfy. 2-D Q or D come back with a leading dim of 1."""
    embeddings("Q", Q)
    embeddings("D", D)
    return _batched(Q, D, q_mask, d_mask)


def _batched(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    q_rank, d_rank = Q.dim(), D.dim()
    if q_rank != 3 and q_rank != 2:
        raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d], got {_shape(Q)}")
    if d_rank != 3 and d_rank != 2 and d_rank != 4:
        raise ValueError(f"D must be [Nd, Ld, d], [Ld, d] or [Nq, K, Ld, d], got {_shape(D)}")
    together(Q, D)
    if d_rank == 4 and (q_rank != 3 or Q.shape[0] != D.shape[0]):
        raise ValueError(
            f"D [Nq, K, Ld, d] (documents of each query's own) needs Q to be [Nq, Lq, d] with"
            f" D.shape[0] == Q.shape[0], got Q {_shape(Q)} and D {_shape(D)}"
        )
    if q_rank == 2:
        Q = Q.unsqueeze(0)
    if d_rank == 2:
        D = D.unsqueeze(0)
    if q_mask is not None:
        q_mask = mask("q_mask", q_mask, "Q", Q)
    if d_mask is not None:
        d_mask = mask("d_mask", d_mask, "D", D)
    return Q, D, q_mask, d_mask


def pairs(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Everything a call of maxsim_pairs must satisfy."""
    embeddings("Q", Q)
    embeddings("D", D)
    if Q.dim() != 3 or D.dim() != 3:
        raise ValueError(f"maxsim_pairs needs Q and D as [B, L, d], got {_shape(Q)} and {_shape(D)}")
    together(Q, D)
    if Q.shape[0] != D.shape[0]:
        raise ValueError(
            f"maxsim_pairs needs as many documents as queries (Q.shape[0] == D.shape[0]),"
            f" got {_shape(Q)} and {_shape(D)}"
        )
    if q_mask is not None:
        q_mask = mask("q_mask", q_mask, "Q", Q)
    if d_mask is not None:
        d_mask = mask("d_mask", d_mask, "D", D)
    return Q, D, q_mask, d_mask


def sequences(name: str, xs: Sequence[Tensor]) -> None:
    """At least one [L, d] tensor, all of one dtype, device and d."""
    if not isinstance(xs, (list, tuple)) or not xs:
        raise TypeError(f"{name} must be a list of at least one [L, d] tensor, got {type(xs).__name__}")
    for i, x in enumerate(xs):
        embeddings(f"{name}[{i}]", x)
        if x.dim() != 2 or x.shape[1] != xs[0].shape[-1]:
            raise ValueError(f"{name}[{i}] must be [L, {xs[0].shape[-1]}], got {_shape(x)}")
        if x.dtype != xs[0].dtype:
            raise TypeError(f"{name}[{i}] must be {xs[0].dtype} as {name}[0], got {x.dtype}")
        if x.device != xs[0].device:
            raise ValueError(f"{name}[{i}] must be on {xs[0].device} as {name}[0], got {x.device}")


_MAX_TOKENS = 1 << 30


def _at_most(name: str, x: Tensor, what: str) -> None:
    _require_size(
        x.shape[0] <= _MAX_TOKENS, lambda: f"{name} must have at most 2**30 {what}, got {_shape(x)}"
    )


def _flat_tokens(q_name: str, Q: Tensor, d_name: str, D: Tensor) -> None:
    """[tokens, d] of one dtype (autocast aside), device and d."""
    embeddings(q_name, Q)
    embeddings(d_name, D)
    for name, x in ((q_name, Q), (d_name, D)):
        if x.dim() != 2:
            raise ValueError(
                f"{name} must be [tokens, d], got {_shape(x)}; for padded tokens there is maxsim"
            )
        _at_most(name, x, "tokens")
    if Q.device != D.device:
        raise ValueError(f"{q_name} and {d_name} must be on the same device, got {Q.device} and {D.device}")
    if Q.dtype != D.dtype and not (autocasting(Q) and torch.float64 not in (Q.dtype, D.dtype)):
        raise TypeError(f"{q_name} and {d_name} must share a dtype, got {Q.dtype} and {D.dtype}")
    if Q.shape[1] != D.shape[1] or Q.shape[1] == 0:
        raise ValueError(
            f"{q_name} and {d_name} must share an embedding dim d of at least 1,"
            f" got {_shape(Q)} and {_shape(D)}"
        )


def packed(Q: Tensor, D: Tensor, cu_seqlens_q: Tensor, cu_seqlens_d: Tensor) -> tuple[Tensor, Tensor]:
    """Everything packed queries and documents must satisfy. Offsets come back as the operators take them."""
    _flat_tokens("Q_packed", Q, "D_packed", D)
    return offsets("cu_seqlens_q", cu_seqlens_q, "Q_packed", Q), offsets(
        "cu_seqlens_d", cu_seqlens_d, "D_packed", D
    )


def offsets(name: str, cu: Tensor, tokens_name: str, tokens: Tensor) -> Tensor:
    """Where each of the packed sequences begins, and the last one ends: contiguous int32 comes back."""
    if not isinstance(cu, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(cu).__name__}")
    if cu.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 (or int64), got {cu.dtype}")
    if cu.dim() != 1:
        raise ValueError(f"{name} must be [sequences + 1], got {_shape(cu)}")
    _require_size(cu.shape[0] > 0, lambda: f"{name} must be [sequences + 1], got {_shape(cu)}")
    if cu.device != tokens.device:
        raise ValueError(f"{name} must be on the device of {tokens_name}, {tokens.device}, got {cu.device}")
    total = tokens.shape[0]
    if _looked_at(cu):
        rising_within(name, cu, total)
    return cu.to(torch.int32).contiguous()


def rising_within(name: str, cu: Tensor, total: int) -> None:
    """Offsets that never fall and lie within [0, total]. Waits for the device."""
    # Compared, not subtracted: the difference of two int64 wraps. What never falls lies within its ends.
    if int(cu[0]) >= 0 and int(cu[-1]) <= total and not bool((cu[1:] < cu[:-1]).any()):
        return
    falls = torch.cat((torch.zeros_like(cu[:1], dtype=torch.bool), cu[1:] < cu[:-1]))
    bad = (cu < 0) | (cu > total) | falls
    raise ValueError(
        f"{name} must never fall and lie within [0, {total}], got {offenders(name, cu, bad, after=True)}"
    )


def _integers(name: str, x: Tensor, wanted: str, tokens_name: str, tokens: Tensor) -> Tensor:
    """[wanted] int32 or int64 beside the tokens; contiguous int32 comes back."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {x.dtype}")
    if x.dim() != 1:
        raise ValueError(f"{name} must be [{wanted}], got {_shape(x)}")
    _at_most(name, x, wanted)
    if x.device != tokens.device:
        raise ValueError(f"{name} must be on the device of {tokens_name}, {tokens.device}, got {x.device}")
    if x.dtype is torch.int64:  # what int32 cannot hold stays out of range
        x = x.clamp(-1, _MAX_TOKENS + 1)
    return x.to(torch.int32).contiguous()


def _equally_long(first: str, x: Tensor, second: str, y: Tensor) -> None:
    _require_size(
        x.shape[0] == y.shape[0],
        lambda: f"{first} and {second} must be equally long, got {_shape(x)} and {_shape(y)}",
    )


def _looked_at(x: Tensor) -> bool:
    """Whether values can be seen without waiting for a device."""
    return x.device.type == "cpu" and has_values(x)


def listed_pairs(
    pair_q: Tensor, pair_d: Tensor, Q: Tensor, queries: int, documents: int
) -> tuple[Tensor, Tensor]:
    """Which packed queries meet which documents. Indices come back as the operators take them."""
    names, counts, given = ("pair_q_idx", "pair_d_idx"), (queries, documents), (pair_q, pair_d)
    pair_q = _integers(names[0], pair_q, "pairs", "Q_packed", Q)
    pair_d = _integers(names[1], pair_d, "pairs", "Q_packed", Q)
    _equally_long(names[0], pair_q, names[1], pair_d)
    for name, index, count in zip(names, given, counts, strict=True):
        if _looked_at(index):
            indices_below(name, index, count)
    return pair_q, pair_d


def indices_below(name: str, index: Tensor, count: int) -> None:
    """Indices of count things. Waits for the device."""
    if bool((bad := (index < 0) | (index >= count)).any()):
        raise ValueError(f"{name} must lie in [0, {count}), got {offenders(name, index, bad)}")


def spans(Q: Tensor, tokens: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """A query, and where documents lie in a buffer of tokens. Both come back as the operators take them."""
    _flat_tokens("Q", Q, "batch_tensor", tokens)
    given = starts, lengths
    starts = _integers("doc_offsets", starts, "documents", "batch_tensor", tokens)
    lengths = _integers("doc_lengths", lengths, "documents", "batch_tensor", tokens)
    _equally_long("doc_offsets", starts, "doc_lengths", lengths)
    total = tokens.shape[0]
    if _looked_at(starts):
        bad = (starts < 0) | (lengths < 0) | (starts.long() + lengths > total)
        if bool(bad.any()):
            got = [offenders(*x, bad) for x in zip(("doc_offsets", "doc_lengths"), given, strict=True)]
            raise ValueError(
                f"doc_offsets and doc_lengths must lie within the {total} tokens of batch_tensor,"
                f" got {' and '.join(got)}"
            )
    return starts, lengths


def padded(
    queries: Tensor, documents: Tensor, query_lengths: Tensor, doc_lengths: Tensor, validate: bool
) -> tuple[Tensor, Tensor]:
    """Everything padded queries, and candidates of each, must satisfy. Masks of the tokens that count come
    back."""
    flag("validate", validate)
    embeddings("queries", queries)
    embeddings("documents", documents)
    if queries.dim() != 3 or documents.dim() != 4 or queries.shape[0] != documents.shape[0]:
        raise ValueError(
            "queries and documents must be [B, Lq, d] and [B, C, Ld, d],"
            f" got {_shape(queries)} and {_shape(documents)}"
        )
    if queries.device != documents.device:
        raise ValueError(
            f"queries and documents must be on the same device, got {queries.device} and {documents.device}"
        )
    if queries.dtype != documents.dtype and not autocasting(queries):
        raise TypeError(
            f"queries and documents must share a dtype, got {queries.dtype} and {documents.dtype}"
        )
    if queries.shape[-1] != documents.shape[-1] or queries.shape[-1] == 0:
        raise ValueError(
            "queries and documents must share an embedding dim d of at least 1,"
            f" got {_shape(queries)} and {_shape(documents)}"
        )
    return (
        _first_tokens("query_lengths", query_lengths, "queries", queries, validate),
        _first_tokens("doc_lengths", doc_lengths, "documents", documents, validate),
    )


def _first_tokens(name: str, lengths: Tensor, tokens_name: str, tokens: Tensor, validate: bool) -> Tensor:
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(lengths).__name__}")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {lengths.dtype}")
    if lengths.shape != tokens.shape[:-2]:
        raise ValueError(f"{name} must be {list(tokens.shape[:-2])}, got {_shape(lengths)}")
    if lengths.device != tokens.device:
        raise ValueError(
            f"{name} must be on the device of {tokens_name}, {tokens.device}, got {lengths.device}"
        )
    longest, least = tokens.shape[-2], int(validate)
    looked_at = has_values(lengths) or torch.compiler.is_compiling() if validate else _looked_at(lengths)
    if looked_at:
        lengths_within(name, lengths, least, longest)
    return torch.arange(longest, device=tokens.device) < lengths.unsqueeze(-1)


def lengths_within(name: str, lengths: Tensor, least: int, longest: int) -> None:
    """Waits for the device."""
    # On the CPU two reductions cost less than the four operations below.
    on_cpu = lengths.device.type == "cpu" and lengths.numel() > 0
    if on_cpu and int(lengths.min()) >= least and int(lengths.max()) <= longest:
        return
    if bool((bad := (lengths < least) | (lengths > longest)).any()):
        raise ValueError(_wrong_lengths(name, lengths, bad, least, longest))


def _wrong_lengths(name: str, lengths: Tensor, bad: Tensor, least: int, longest: int) -> str:
    lower = "> 0" if least else ">= 0"
    return f"{name} must all be {lower} and <= {longest}, got {offenders(name, lengths, bad)}"


class LengthError(ValueError, RuntimeError):
    """Lengths that are found to be wrong only once they have been waited for."""


def longest_of(name: str, lengths: Tensor, longest: int) -> int:
    """The longest of lengths up to `longest`. Waits for the device, and looks at the others on the way."""
    if lengths.is_meta:
        raise ValueError(f"{name} must hold values, which what is packed depends on, got a meta tensor")
    if lengths.numel() == 0:
        return 0
    if not has_values(lengths):  # the traced graph asserts it
        shortest, most = lengths.amin().item(), lengths.amax().item()
        torch._check(shortest >= 0)
        torch._check(most >= 0)
        torch._check(most <= longest)
        return most  # type: ignore[return-value]
    least, most = torch.stack(lengths.aminmax()).tolist()
    if least < 0 or most > longest:
        bad = (lengths < 0) | (lengths > longest)
        raise LengthError(_wrong_lengths(name, lengths, bad, 0, longest))
    return int(most)


def longest(name: str, length: Any, offsets: Tensor) -> None:
    """A length that no packed sequence exceeds, as far as can be seen without waiting for a device."""
    bound(name, length, offsets.diff() if _looked_at(offsets) else offsets)


def bound(name: str, length: Any, lengths: Tensor) -> None:
    """The same of sequences whose lengths are given."""
    number = torch.compiler.is_compiling() or hasattr(length, "__index__")  # it may be a symbol
    if isinstance(length, (bool, Tensor)) or not number:
        raise TypeError(f"{name} must be an int or None, got {type(length).__name__}")
    if _looked_at(lengths):
        most = int(lengths.amax()) if lengths.numel() else 0
        if length < most:
            raise ValueError(f"{name} must be at least {most}, the longest sequence, got {brief(length)}")
    _require_size(length >= 0, lambda: f"{name} must not be negative, got {brief(length)}")


def no_forward_ad(name: str, *tensors: Tensor | None) -> None:
    """An operator without a rule for tangents would drop them, which reads as a derivative of zero."""
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            f"{name} has no forward-mode derivative (jvp): use reverse mode, as backward() does"
        )


def quantized(
    Q: Tensor,
    D: Tensor,
    scale_Q: Tensor,
    scale_D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Everything a call on quantized tokens of one of these dtypes must satisfy. 2-D Q or D come back with a
    leading dim of 1, scales 0-dim or shaped as masks, float32."""
    for name, x in (("Q", Q), ("D", D)):
        if not isinstance(x, Tensor) or x.dtype not in dtypes or x.layout != torch.strided or x.is_nested:
            _bad_tokens(name, x, dtypes)
        _no_gradient(name, x)
    if Q.dtype != D.dtype:
        raise TypeError(f"Q and D must share a dtype, got {Q.dtype} and {D.dtype}")
    Q, D, q_mask, d_mask = _batched(Q, D, q_mask, d_mask)
    scale_Q, scale_D = scale("scale_Q", scale_Q, "Q", Q), scale("scale_D", scale_D, "D", D)
    return Q, D, scale_Q, scale_D, q_mask, d_mask


def scale(name: str, s: Tensor, tokens_name: str, tokens: Tensor) -> Tensor:
    """One scale for all tokens, 0-dim, or one a token, shaped as a mask. float32 comes back."""
    if not isinstance(s, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor (0-dim or one scale a token), got {type(s).__name__}")
    if s.dtype not in FLOATS or s.layout != torch.strided:
        raise TypeError(f"{name} must be a dense float32 tensor, got {s.dtype}, {s.layout}")
    if s.device != tokens.device:
        raise ValueError(f"{name} must be on the device of {tokens_name}, {tokens.device}, got {s.device}")
    _no_gradient(name, s)
    fitted = s
    if s.dim() == 1:
        fitted = s.squeeze(0) if s.shape[0] == 1 else s.unsqueeze(0)
    if fitted.dim() != 0 and fitted.shape != tokens.shape[:-1]:
        raise ValueError(
            f"{name} must be 0-dim or have the shape of {tokens_name} without d, {list(tokens.shape[:-1])},"
            f" got {_shape(s)}"
        )
    return fitted.to(torch.float32)


def _no_gradient(name: str, x: Tensor) -> None:
    tangent = forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
    if tangent or (x.requires_grad and torch.is_grad_enabled()):
        raise ValueError(
            f"{name} wants a gradient, and the scores of quantized tokens have none: detach it, or call under"
            " torch.no_grad()"
        )


def searched(name: str, x: Tensor, scale: Tensor | None) -> None:
    """Embeddings, or codes with their scales."""
    if not isinstance(x, Tensor) or x.dtype not in CODES:
        embeddings(name, x)
        if scale is not None:
            raise ValueError(f"scale_{name} must be None where {name} is no codes, got {x.dtype} {name}")
        return
    if x.layout != torch.strided or x.is_nested:
        _bad_tokens(name, x, CODES)
    if scale is None:
        raise TypeError(
            f"scale_{name} must be a torch.Tensor (0-dim or one scale a token) for {name} of {x.dtype},"
            " got None"
        )


def corpus(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    scale_Q: Tensor | None = None,
    scale_D: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Everything a search of D must satisfy: as batched, but D may be on the CPU while Q is on a GPU."""
    searched("Q", Q, scale_Q)
    searched("D", D, scale_D)
    if Q.dtype != D.dtype and (Q.dtype in CODES or D.dtype in CODES):
        raise TypeError(f"Q and D must share a dtype, got {Q.dtype} and {D.dtype}")
    if Q.dim() not in (2, 3):
        raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d], got {_shape(Q)}")
    if D.dim() not in (2, 3):
        raise ValueError(f"D must be [Nd, Ld, d] or [Ld, d], got {_shape(D)}")
    if Q.device != D.device and not (Q.is_cuda and D.device.type == "cpu"):
        raise ValueError(
            f"Q and D must be on the same device (or Q on a GPU and D on the CPU),"
            f" got {Q.device} and {D.device}"
        )
    alike(Q, D)
    Q = Q.unsqueeze(0) if Q.dim() == 2 else Q
    D = D.unsqueeze(0) if D.dim() == 2 else D
    if scale_Q is not None and scale_D is not None:
        scale_Q, scale_D = scale("scale_Q", scale_Q, "Q", Q), scale("scale_D", scale_D, "D", D)
    return Q, D, mask("q_mask", q_mask, "Q", Q), mask("d_mask", d_mask, "D", D), scale_Q, scale_D


def from_hidden(
    Q: Tensor,
    H_d: Tensor,
    W: Tensor,
    b: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    project_Q: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Everything a call on hidden states must satisfy but the mix of dtypes. Q comes back as [Nq, Lq, ...],
    masks as bool."""
    for name, x in (("Q", Q), ("H_d", H_d), ("W", W), *([] if b is None else [("b", b)])):
        embeddings(name, x)
        if x.device != Q.device:
            raise ValueError(f"{name} must be on the device of Q, {Q.device}, got {x.device}")
    if Q.dim() not in (2, 3):
        raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d], got {_shape(Q)}")
    if H_d.dim() != 3:
        raise ValueError(f"H_d must be [Nd, Ld, d_model], got {_shape(H_d)}")
    if W.dim() != 2 or 0 in W.shape or W.shape[1] != H_d.shape[2]:
        raise ValueError(f"W must be [d, d_model] with d_model = {H_d.shape[2]}, got {_shape(W)}")
    width, what = (W.shape[1], "d_model") if project_Q else (W.shape[0], "d")
    if Q.shape[-1] != width:
        raise ValueError(f"Q and W must be of the same {what}, got Q {_shape(Q)} and W {_shape(W)}")
    if b is not None and b.shape != W.shape[:1]:
        raise ValueError(f"b must be [d] with d = {W.shape[0]}, as W has it, got {_shape(b)}")
    Q = Q.unsqueeze(0) if Q.dim() == 2 else Q
    return Q, mask("q_mask", q_mask, "Q", Q), mask("d_mask", d_mask, "H_d", H_d)


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {brief(value)}")


def integer(name: str, value: Any, wanted: str = "an int") -> None:
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        got = repr(value) if isinstance(value, bool) else type(value).__name__
        raise TypeError(f"{name} must be {wanted}, got {got}")


def positive(name: str, value: Any) -> None:
    integer(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {brief(value)}")


def strategy(backward: str | None) -> str:
    if backward is None:
        return "auto"
    if backward not in BACKWARDS:
        raise ValueError(f"backward must be one of {BACKWARDS} or None, got {brief(backward)}")
    return backward


def keeping(winners: str | None) -> None:
    if winners is not None and winners not in WINNERS:
        raise ValueError(f"winners must be one of {WINNERS} or None, got {brief(winners)}")


def known_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS} or None, got {brief(precision)}")


# How many of the entries that are wrong a message names.
_NAMED = 4
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2


def offenders(name: str, x: Tensor, bad: Tensor, after: bool = False) -> str:
    """What a message says of a tensor some of whose entries are bad: its dtype, its shape, and the first of
    them, however many there are. after: a bad entry is shown with the one before it."""
    places = bad.nonzero()
    named = []
    for place in places[:_NAMED].tolist():
        entry = f"{name}[{', '.join(map(str, place))}] = {x[tuple(place)].item()}"
        if after and place[0]:
            entry += f" after {x[place[0] - 1].item()}"
        named.append(entry)
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return f"{str(x.dtype).removeprefix('torch.')} {_shape(x)} with {', '.join(named)}{more}"


def brief(value: object) -> str:
    """What a message says of an argument that may be anything, and of any size."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {_shape(value)}"
    return _BRIEF.repr(value)


def _shape(x: Tensor) -> str:
    return str(list(x.shape))
