"""What the modules of losses over a batch have in common."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from late_interaction._checks.options import check_flag
from late_interaction._contrastive import check

if TYPE_CHECKING:  # needs Python 3.11, or typing_extensions, which only type checkers have for certain
    from typing_extensions import Unpack


class BatchInputs(TypedDict, total=False):
    """What a batch has beside queries and documents, as the functions name it."""

    labels: Tensor | None
    hard_negatives: Tensor | None
    q_mask: Tensor | None
    d_mask: Tensor | None
    hard_negatives_mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_d: Tensor | None
    cu_seqlens_h: Tensor | None


class BatchLoss(torch.nn.Module):
    """A function of queries and documents with its options. The temperature is kept as its logarithm, so that
    it stays above 0."""

    log_temperature: Tensor

    def __init__(
        self, function: Callable[..., Tensor], temperature: float, learnable: bool, options: dict[str, Any]
    ) -> None:
        super().__init__()
        check_flag("learnable", learnable)
        self._function = function
        log = torch.tensor(float(check.temperature(temperature, None))).log()
        if learnable:
            self.log_temperature = torch.nn.Parameter(log)
        else:
            self.register_buffer("log_temperature", log)
        self.options = options

    @property
    def temperature(self) -> Tensor:
        return self.log_temperature.exp()

    def forward(self, Q: Tensor, D: Tensor, **inputs: "Unpack[BatchInputs]") -> Tensor:
        """``inputs``: labels, hard_negatives, masks and offsets, as the function names them."""
        return self._function(Q, D, **self.numbers(), **inputs, **self.options)

    def numbers(self) -> dict[str, Tensor]:
        """The arguments that may be learned."""
        return {"temperature": self.temperature}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if name != "group")
