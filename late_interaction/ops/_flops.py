"""How many operations the operators take, for ``torch.utils.flop_counter.FlopCounterMode``.

As PyTorch counts its own: a product of two numbers and its addition are two operations, all tokens count,
masked ones too, and what is not multiplied is free. Codes count as the values that they stand for. From
winners, each query token and document adds one row to each gradient. Lengths of listed pairs and spans are
read, which waits for the device; where tensors have no values, pairs count as if all lengths were equal.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.tensors import has_values
from late_interaction.ops._library import operators

# The arguments of a call by their names. Sizes are Any: they may be symbols.
_Call = Mapping[str, Any]
_Formula = Callable[[_Call], Any]


def _rows(x: Tensor) -> Any:
    return prod(x.shape[:-1])


def _documents(call: _Call) -> Any:
    if "codes" in call:
        return call["codes"].numel()
    name = next(name for name in ("D", "H", "hidden") if name in call)
    return _rows(call[name])


def _lengths(call: _Call, side: str) -> Tensor:
    return call[f"cu_seqlens_{side}"].diff()[call[f"pair_{side}"].long()].long()


def _of_pairs(call: _Call, *sides: str) -> Any:
    """Sum the products of the lengths of listed sequences."""
    if has_values(call["pair_q"]):
        return int(torch.stack([_lengths(call, side) for side in sides]).prod(0).sum())
    tokens = prod(_rows(call["Q" if side == "q" else "D"]) for side in sides)
    return len(call["pair_q"]) * tokens // max(prod(len(call[f"cu_seqlens_{x}"]) - 1 for x in sides), 1)


def _meetings(call: _Call) -> Any:
    """Count the pairs of a query token and a document token that meet."""
    if "pair_q" in call:
        return _of_pairs(call, "q", "d")
    Q, tokens = call["Q"], _documents(call)
    if "starts" in call and has_values(call["lengths"]):
        tokens = int(call["lengths"].sum())
    own = call.get("paired") or ("D" in call and call["D"].dim() == 4)
    return _rows(Q) * tokens // (max(Q.shape[0], 1) if own else 1)


def _similarities(call: _Call) -> Any:
    return 2 * _meetings(call) * call.get("d", call["Q"].shape[-1])


def _needed(call: _Call, *names: str) -> int:
    return sum(bool(call[f"need_grad_{name}"]) for name in names)


def _gathered(call: _Call) -> Any:
    """Count what one gradient takes from winners."""
    if "pair_q" in call:
        winners = _of_pairs(call, "q")
    elif "winners" in call:
        winners = call["winners"].numel()
    else:
        winners = call["grad_scores"].numel() * call["Q"].shape[1]
    return 2 * winners * call["Q"].shape[-1]


def _gradients(call: _Call) -> Any:
    return _needed(call, "Q", "D") * _gathered(call)


def _added_packed_gradients(call: _Call) -> Any:
    return ((call["q_sums"] is not None) + (call["d_sums"] is not None)) * _gathered(call)


def _added_gradients(call: _Call) -> Any:
    of_documents = call["grad_D"].numel() > 0 or call["d_sums"] is not None
    return ((call["grad_Q"].numel() > 0) + of_documents) * _gathered(call)


def _smooth_gradients(call: _Call) -> Any:
    """Multiply the weights of all similarities with the tokens of either side."""
    return _needed(call, "Q", "D") * _similarities(call)


def _projection(call: _Call) -> Any:
    return 2 * _documents(call) * call["W"].numel()


def _hidden_gradients(call: _Call) -> Any:
    to_rows = _needed(call, "Q") + (_needed(call, "H", "W", "b") > 0)
    return to_rows * _gathered(call) + _needed(call, "H", "W") * _projection(call)


def _weight_gradient(call: _Call) -> Any:
    return 2 * _rows(call["hidden"]) * call["hidden"].shape[-1] * call["grad"].shape[-1]


def _encoding(call: _Call) -> Any:
    tokens, offsets = call["tokens"], call["cu_seqlens"]
    sequences = len(tokens) if offsets is None else len(offsets) - 1
    partitions = 0 if call["projection"] is None else sequences * 2 ** call["k_sim"] * call["d_proj"]
    products = _rows(tokens) * call["k_sim"] + partitions
    return 2 * call["repetitions"] * tokens.shape[-1] * products


# What operators add up. Clustering stops when it has converged, and XTR's groups of similarities are computed
# again where they may be selected: nothing says beforehand how many products that takes.
FORMULAS: dict[tuple[_Formula, ...], str] = {
    (_similarities,): """
        maxsim maxsim_winners maxsim_no_autograd maxsim_winners_no_autograd
        maxsim_weighted maxsim_weighted_winners maxsim_varlen maxsim_varlen_winners
        maxsim_varlen_weighted maxsim_varlen_weighted_winners maxsim_pairs_packed maxsim_pairs_packed_winners
        maxsim_pairs_packed_weighted maxsim_pairs_packed_weighted_winners maxsim_spans
        maxsim_quantized maxsim_quantized_packed maxsim_dequantized maxsim_hamming maxsim_hamming_packed
        maxsim_asymmetric maxsim_asymmetric_packed
        maxsim_residual maxsim_residual_winners maxsim_residual_normed
        smooth_maxsim smooth_logs xtr_winners xtr_group_maxima_ softmax_product_rows_
    """,
    (_gradients,): """
        maxsim_backward maxsim_backward_no_autograd maxsim_weighted_backward maxsim_varlen_backward
        maxsim_varlen_weighted_backward maxsim_pairs_packed_backward maxsim_pairs_packed_weighted_backward
    """,
    (_similarities, _gradients): "maxsim_backward_recompute",
    (_gathered,): "maxsim_residual_backward",
    (_added_gradients,): "maxsim_backward_into_",
    (_added_packed_gradients,): "maxsim_varlen_backward_into_",
    (_similarities, _smooth_gradients): "smooth_maxsim_backward",
    (_similarities, _similarities): "smooth_gradient",
    (_projection,): "project_rows_",
    (_projection, _similarities): "maxsim_from_hidden maxsim_from_hidden_winners project_scores",
    (_projection, _hidden_gradients): "maxsim_from_hidden_backward",
    (_weight_gradient,): "wgrad_splitk_",
    (_encoding,): "muvera_encode",
}


def _count(operator: Any, parts: tuple[_Formula, ...]) -> Callable[..., Any]:
    defaults = {x.name: x.default_value for x in operator.default._schema.arguments}

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> Any:
        call = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        return sum(part(call) for part in parts)

    return count


def register() -> None:
    """Tell PyTorch the formulas. Imports Triton where that is installed."""
    from torch.utils.flop_counter import register_flop_formula

    for parts, names in FORMULAS.items():
        for name in names.split():
            operator = getattr(operators, name)
            register_flop_formula(operator, get_raw=True)(_count(operator, parts))
