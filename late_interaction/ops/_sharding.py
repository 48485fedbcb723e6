"""How the operators on padded tokens take DTensors: which shards of their inputs give which of their results.

Over each dim of a device mesh one of these holds, and PyTorch takes the one that moves the least:

- queries are sharded, and so are scores, winners and the gradient of ``Q``; that of ``D``, which every shard
  has, is a partial sum. Where documents belong to a query, they are sharded with it;
- documents are sharded, and scores by their columns; the gradient of ``Q`` is the partial sum;
- nothing is sharded.

Tokens and dims are never sharded: a maximum is over all tokens of a document. XTR selects among all
documents, which so are never sharded there.
"""

from typing import Any

from late_interaction._torch import sharding_schemas
from late_interaction.ops._library import operators

_FORWARD = (
    *("maxsim", "maxsim_winners", "maxsim_no_autograd", "maxsim_winners_no_autograd"),
    *("maxsim_weighted", "maxsim_weighted_winners", "smooth_maxsim", "xtr_winners"),
)
_BACKWARD = (
    *("maxsim_backward", "maxsim_backward_no_autograd", "maxsim_backward_recompute"),
    *("maxsim_weighted_backward", "smooth_maxsim_backward"),
)


def register() -> None:
    """Tell PyTorch the strategies. Imports DTensor."""
    from torch.distributed.tensor.experimental import register_sharding

    schemas = sharding_schemas()
    for name in (*_FORWARD, *_BACKWARD):
        operator = getattr(operators, name).default
        register_sharding(operator)(_strategies(operator._schema))
        # PyTorch keeps a strategy for later calls of the same tensors and integers. Flags count, too.
        schemas[operator].static_argnum = 0


def _strategies(schema: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    arguments = {x.name: x.default_value for x in schema.arguments}
    results = [x.name or "scores" for x in schema.returns]

    def strategies(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        call = {**arguments, **dict(zip(arguments, args, strict=False)), **kwargs}
        paired, rank = call.get("paired", False), call["D"].ndim
        in_batch = rank == 3 and not paired

        def placed(queries: Any, documents: Any, scores: Any) -> tuple[list[Any], list[Any]]:
            of = dict.fromkeys(("Q", "q_mask", "q_weights"), queries)
            of |= dict.fromkeys(("D", "d_mask"), documents)
            of |= dict.fromkeys(("scores", "grad_scores", "winners", "denominators"), scores)
            sharded = scores != Replicate()
            for name, x in (("grad_Q", queries), ("grad_D", documents), ("grad_weights", queries)):
                of[name] = Partial() if sharded and x == Replicate() else x
            given = list(arguments)[: len(args)]  # tensors come as descriptions of them
            inputs = [of[name] if hasattr(call[name], "tensor_meta") else None for name in given]
            return [of[name] for name in results], inputs

        found = [placed(Replicate(), Replicate(), Replicate())]
        found.append(placed(Shard(0), Replicate() if in_batch else Shard(0), Shard(0)))
        if not paired and "k" not in call:
            found.append(placed(Replicate(), Shard(rank - 3), Shard(1)))
        return found

    return strategies
