"""Registers the softmax operators: shapes, the CPU's kernels, and no gradients."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._torch import register_fake
from late_interaction.ops._library import library, operators
from late_interaction.ops._registration import fake_nothing, register_helper
from late_interaction.ops.softmax import cpu


def _fake_sums(scores: Tensor, **_: Any) -> Tensor:
    return scores.new_empty((4, scores.shape[0]))


def _fake_product_sums(Q: Tensor, **_: Any) -> Tensor:
    return Q.new_empty((6, Q.shape[0]), dtype=torch.float32)


for _op, _kernel, _fake in (
    (operators.softmax_row_sums.default, cpu.row_sums, _fake_sums),
    (operators.softmax_rows_.default, cpu.rows, _fake_sums),
    (operators.softmax_sums_.default, cpu.sums, _fake_sums),
    (operators.softmax_weights_.default, cpu.weights, fake_nothing),
    (operators.scale_rows_.default, cpu.scale_rows, fake_nothing),
    (operators.softmax_product_rows_.default, cpu.product_rows, _fake_product_sums),
):
    register_helper(_op, _fake)
    library.impl(_op, _kernel, "CPU")
_can = operators.can_softmax_product_rows.default
library.impl(_can, cpu.can_product_rows, "CPU")
register_fake(library, _can.name(), lambda Q, D: False)
