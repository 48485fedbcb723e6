"""MaxSim, the scoring of late-interaction models, and its gradients, as compiled PyTorch operators.

``score[i, j] = sum_s max_t <Q[i, s], D[j, t]>``, without the ``[Nq, Nd, Lq, Ld]`` similarity tensor::

    import late_interaction as li

    scores = li.maxsim(Q, D, q_mask, d_mask)          # [Nq, Nd], differentiable
    scores, indices = li.search(Q, D, k=10)           # the best documents, in bounded memory

The operators themselves are ``torch.ops.late_interaction.*`` (see :mod:`late_interaction.ops`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from late_interaction import ops
from late_interaction._maxsim import maxsim, maxsim_pairs, maxsim_with_winners
from late_interaction._version import __version__
from late_interaction.codes import Codes
from late_interaction.tokens import Tokens

if TYPE_CHECKING:
    # Modules are attributes, too (__getattr__).
    from late_interaction import alias as alias
    from late_interaction import alignment as alignment
    from late_interaction import codecs as codecs
    from late_interaction import codes as codes
    from late_interaction import corpus as corpus
    from late_interaction import doctor as doctor
    from late_interaction import evaluation as evaluation
    from late_interaction import fused_head as fused_head
    from late_interaction import integrations as integrations
    from late_interaction import lik as lik
    from late_interaction import losses as losses
    from late_interaction import mining as mining
    from late_interaction import muvera as muvera
    from late_interaction import plan as plan
    from late_interaction import pooling as pooling
    from late_interaction import ray as ray
    from late_interaction import reference
    from late_interaction import score_pairs as score_pairs
    from late_interaction import smooth as smooth
    from late_interaction import streaming as streaming
    from late_interaction import tokens as tokens
    from late_interaction import xtr as xtr
    from late_interaction._search.result import SearchResult
    from late_interaction._search.search import search
    from late_interaction._search.topk import TopK
    from late_interaction.alias import install_as, uninstall_as
    from late_interaction.alignment import Alignment, explain
    from late_interaction.alignment.plot import plot_alignment
    from late_interaction.corpus import Corpus
    from late_interaction.evaluation import evaluate_recall
    from late_interaction.integrations.patches import patch, patched, unpatch
    from late_interaction.losses import cached_contrastive_step
    from late_interaction.mining import hard_negatives, mine_hard_negatives
    from late_interaction.muvera import Muvera
    from late_interaction.plan import explain_plan
    from late_interaction.pooling import pool_tokens
    from late_interaction.smooth import smooth_maxsim, smooth_maxsim_pairs
    from late_interaction.streaming import stream_layers
    from late_interaction.xtr import xtr_scores

# Loaded when it is first asked for, since all of it takes longer than the operators: module -> names.
_LATER = {
    "_search.result": ("SearchResult",),
    "_search.search": ("search",),
    "_search.topk": ("TopK",),
    "alias": ("install_as", "uninstall_as"),
    "alignment": ("Alignment", "explain"),
    "alignment.plot": ("plot_alignment",),
    "corpus": ("Corpus",),
    "evaluation": ("evaluate_recall",),
    "integrations.patches": ("patch", "patched", "unpatch"),
    "losses": ("cached_contrastive_step",),
    "mining": ("hard_negatives", "mine_hard_negatives"),
    "muvera": ("Muvera",),
    "plan": ("explain_plan",),
    "pooling": ("pool_tokens",),
    "smooth": ("smooth_maxsim", "smooth_maxsim_pairs"),
    "streaming": ("stream_layers",),
    "xtr": ("xtr_scores",),
}
_MODULE_OF = {name: module for module, names in _LATER.items() for name in names}

__all__ = [
    "Alignment",
    "Codes",
    "Corpus",
    "Muvera",
    "SearchResult",
    "Tokens",
    "TopK",
    "__version__",
    "cached_contrastive_step",
    "evaluate_recall",
    "explain",
    "explain_plan",
    "hard_negatives",
    "install_as",
    "maxsim",
    "maxsim_pairs",
    "maxsim_with_winners",
    "mine_hard_negatives",
    "ops",
    "patch",
    "patched",
    "plot_alignment",
    "pool_tokens",
    "reference",
    "search",
    "smooth_maxsim",
    "smooth_maxsim_pairs",
    "stream_layers",
    "uninstall_as",
    "unpatch",
    "xtr_scores",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of this package, that nobody has asked for yet."""
        where = _MODULE_OF.get(name)
        if where is not None:
            found = getattr(importlib.import_module(f"{__name__}.{where}"), name)
            globals()[name] = found
            return found
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"{__name__}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{__name__}.{name}":
                    raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
