"""The base class of the modules of losses over a batch."""

import math
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.losses import check_above_0
from late_interaction._checks.options import check_flag
from late_interaction.tokens import Tokens, TokensLike

# Documents of each query: [Nq], [Nq, P], pairs as two tensors, or a list for each query.
LabelsLike = Tensor | tuple[Tensor, Tensor] | list[list[int]]


def options_of(scope: dict[str, Any], others: Container[str] = ()) -> dict[str, Any]:
    """Return the arguments of a module's __init__, from its ``locals()``, without ``others``."""
    return {k: x for k, x in scope.items() if k not in ("self", "__class__") and k not in others}


class _Shared:
    """The process group of a module, which its copies share. It belongs to this process alone."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shared":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is None:
            return _Shared, (None,)
        raise TypeError(
            "a loss with group= cannot be pickled: the process group belongs to this process. Save the loss's"
            " state_dict(), and make the loss in the other process with a group of that process"
        )


class BatchLoss(torch.nn.Module):
    """A function of queries and documents with its options.

    The temperature is kept as its logarithm, so that it stays above 0. Numbers that may be learned have the
    shape [1]: FSDP2 shards no 0-dim parameter.
    """

    log_temperature: Tensor

    def __init__(self, function: Callable[..., Tensor], given: dict[str, Any]) -> None:
        """Keep the function and its options. ``given``: the ``locals()`` of the module's own __init__."""
        super().__init__()
        learnable = given.get("learnable", False)
        check_flag("learnable", learnable)
        self._function = function
        self._shared = _Shared(given["group"])
        self.options = options_of(given, {"learnable", "temperature", "bias", "group"})
        self._learn(
            "log_temperature", math.log(check_above_0("temperature", given["temperature"])), learnable
        )

    def _learn(self, name: str, start: float, learnable: bool) -> None:
        """Register a number as a parameter, or as a buffer if it is not learned."""
        number = torch.tensor([start])
        if learnable:
            self.register_parameter(name, torch.nn.Parameter(number))
        else:
            self.register_buffer(name, number)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in self.state_dict():
            number = state_dict.get(prefix + name)
            if isinstance(number, Tensor) and number.dim() == 0:  # as it was saved before it was [1]
                state_dict[prefix + name] = number.view(1)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def temperature(self) -> Tensor:
        return self.log_temperature.exp()

    def forward(
        self,
        Q: TokensLike,
        D: TokensLike,
        labels: LabelsLike | None = None,
        *,
        hard_negatives: TokensLike | None = None,
        candidate_mask: Tensor | None = None,
        exclude: LabelsLike | None = None,
    ) -> Tensor:
        numbers = self.numbers()
        first = Q[0] if isinstance(Q, list | tuple) and Q else Q
        if not self._parameters and isinstance(first, Tensor | Tokens):
            # Constants need not be moved to the tokens' device by the caller.
            numbers = {name: x.to(first.device, non_blocking=True) for name, x in numbers.items()}
        beside = {"hard_negatives": hard_negatives, "candidate_mask": candidate_mask, "exclude": exclude}
        options = numbers | self.options
        return self._function(Q, D, labels, group=self._shared.group, **beside, **options)

    def numbers(self) -> dict[str, Tensor]:
        """Return the arguments that may be learned."""
        return {"temperature": self.temperature}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
