"""The operators ``torch.ops.late_interaction.*``: public, and what every function of this package calls.

Each module of this folder documents its operators, and tells PyTorch their shapes, gradients and autocast:

- :mod:`late_interaction.ops.dense`: ``maxsim``, ``maxsim_winners``, ``maxsim_backward`` and
  ``maxsim_backward_recompute``, on padded tokens;
- :mod:`late_interaction.ops.weighted`: ``maxsim_weighted``, ``maxsim_weighted_winners`` and
  ``maxsim_weighted_backward``, the same with weights of query tokens;
- :mod:`late_interaction.ops.varlen`: ``maxsim_varlen``, ``maxsim_varlen_winners`` and
  ``maxsim_varlen_backward``, on packed tokens; ``maxsim_varlen_weighted``,
  ``maxsim_varlen_weighted_winners``, ``maxsim_varlen_weighted_backward``;
- :mod:`late_interaction.ops.pairs`: ``maxsim_pairs_packed``, ``maxsim_pairs_packed_winners``,
  ``maxsim_pairs_packed_backward``, on listed pairs of them, and ``maxsim_spans``;
  ``maxsim_pairs_packed_weighted``, ``maxsim_pairs_packed_weighted_winners``,
  ``maxsim_pairs_packed_weighted_backward``;
- :mod:`late_interaction.ops.quantized`: ``maxsim_quantized``, ``maxsim_quantized_packed``,
  ``maxsim_dequantized``, on codes with scales;
- :mod:`late_interaction.ops.packed_codes`: ``maxsim_hamming``, ``maxsim_asymmetric``,
  ``maxsim_hamming_packed``, ``maxsim_asymmetric_packed``, on 1-bit and 4-bit codes;
- :mod:`late_interaction.ops.plaid`: ``maxsim_residual``, ``maxsim_residual_winners``,
  ``maxsim_residual_backward``, ``maxsim_residual_normed``, ``plaid_approx_score``, on compressed documents;
- :mod:`late_interaction.ops.from_hidden`: ``maxsim_from_hidden``, ``maxsim_from_hidden_winners``,
  ``maxsim_from_hidden_backward``, on hidden states;
- :mod:`late_interaction.ops.smooth`: ``smooth_maxsim`` and ``smooth_maxsim_backward``, with a smooth maximum;
- :mod:`late_interaction.ops.xtr`: ``xtr_winners``, ``xtr_select_``, where only the largest similarities of a
  batch count;
- :mod:`late_interaction.ops.pooling`: ``ward_labels`` and ``kmeans_labels``, clusters of a document's tokens;
- :mod:`late_interaction.ops.muvera`: ``muvera_encode``, one vector for all tokens of a sequence;
- :mod:`late_interaction.ops.softmax`: ``softmax_row_sums``, ``softmax_rows_``, ``softmax_sums_`` and
  ``softmax_weights_``, the cross entropy of a matrix of scores: steps of ``losses.contrastive``;
- :mod:`late_interaction.ops.topk`: ``select_best``, ``pack_found``, ``add_checksum_`` and ``merge_found``,
  the best documents and what processes tell each other of them: steps of a search.

``precision`` is how float32 inputs multiply: ``"highest"``, ``"high"`` (TF32's significant bits),
``"medium"`` (bfloat16) or ``"fp16"``; the last two in TF32 where that is faster. Under autocast, float32
inputs keep their dtype and multiply in the autocast dtype, likewise.

``torch.utils.flop_counter.FlopCounterMode`` counts what each operator multiplies. Operators on padded tokens,
but for those on codes and hidden states, take DTensors whose first dim is sharded, where they lie.

``torch.func.grad``, ``vjp`` and ``jacrev`` take every differentiable operator, and the operators on dense
tokens without weights at every level. Forward-mode derivatives
(``jvp``, ``jacfwd``, dual tensors) and ``vmap`` of a forward are a RuntimeError that says so.

>>> import torch, late_interaction
>>> Q, D = torch.eye(2).unsqueeze(0), torch.eye(2).flip(0).unsqueeze(0)
>>> scores, winners = torch.ops.late_interaction.maxsim_winners(Q, D, None, None)
>>> scores, winners
(tensor([[2.]]), tensor([[[1, 0]]], dtype=torch.int16))
"""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

# The modules register their operators.
from late_interaction.ops import (  # noqa: F401
    dense,
    host_copy,
    muvera,
    packed_codes,
    pairs,
    plaid,
    pooling,
    quantized,
    softmax,
    topk,
    varlen,
    weighted,
    xtr,
)
from late_interaction.ops._library import cuda_capability, cuda_missing, operators, watch_for_gpus
from late_interaction.ops.from_hidden import dispatch as _from_hidden  # noqa: F401
from late_interaction.ops.smooth import dispatch as _smooth  # noqa: F401

watch_for_gpus()


def _when_imported(name: str, act: Callable[[], None]) -> None:
    """Call ``act`` now if the module is there, else as soon as it has been imported.

    Such modules take longer to import than this package, and most processes never do.
    """
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Watch(name, act))


class _Watch:
    """A finder of one module, which others find and load."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self.act()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def _register_flops() -> None:
    from late_interaction.ops import _flops

    _flops.register()


def _register_shardings() -> None:
    from late_interaction.ops import _sharding

    # PyTorch does not promise these names. Without them it refuses DTensors.
    with suppress(ImportError, AttributeError):
        _sharding.register()


_when_imported("torch.utils.flop_counter", _register_flops)
_when_imported("torch.distributed.tensor", _register_shardings)

# The default overload of each operator is an attribute of this module.
_NAMES = """
    maxsim maxsim_winners maxsim_backward maxsim_backward_recompute maxsim_weighted maxsim_weighted_winners
    maxsim_weighted_backward maxsim_varlen maxsim_varlen_winners maxsim_varlen_backward
    maxsim_varlen_weighted maxsim_varlen_weighted_winners maxsim_varlen_weighted_backward
    maxsim_pairs_packed maxsim_pairs_packed_winners maxsim_pairs_packed_backward
    maxsim_pairs_packed_weighted maxsim_pairs_packed_weighted_winners maxsim_pairs_packed_weighted_backward
    maxsim_spans maxsim_quantized maxsim_quantized_packed maxsim_dequantized maxsim_hamming
    maxsim_asymmetric maxsim_hamming_packed maxsim_asymmetric_packed maxsim_residual maxsim_residual_winners
    maxsim_residual_backward maxsim_residual_normed plaid_approx_score maxsim_from_hidden
    maxsim_from_hidden_winners maxsim_from_hidden_backward smooth_maxsim smooth_maxsim_backward xtr_winners
    ward_labels kmeans_labels muvera_encode forced_plan explain_plan explain_packed_plan
    explain_residual_plan
"""
_OPERATORS = _NAMES.split()
globals().update({name: getattr(operators, name).default for name in _OPERATORS})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = ["cuda_capability", "cuda_missing", *_OPERATORS]
