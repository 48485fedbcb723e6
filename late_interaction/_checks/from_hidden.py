"""Checks of maxsim_from_hidden."""

from torch import Tensor

from late_interaction._checks.messages import shape_of
from late_interaction._checks.tensors import check_device, check_embeddings, check_mask


def check_from_hidden(
    Q: Tensor,
    H_d: Tensor,
    W: Tensor,
    b: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    project_Q: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """All but the mix of dtypes. Q comes back as [Nq, Lq, ...], masks as bool."""
    for name, x in (("Q", Q), ("H_d", H_d), ("W", W), *([] if b is None else [("b", b)])):
        check_embeddings(name, x)
        check_device(name, x, "Q", Q.device)
    if Q.dim() not in (2, 3):
        raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d], got {shape_of(Q)}")
    if H_d.dim() != 3:
        raise ValueError(f"H_d must be [Nd, Ld, d_model], got {shape_of(H_d)}")
    if W.dim() != 2 or 0 in W.shape or W.shape[1] != H_d.shape[2]:
        raise ValueError(f"W must be [d, d_model] with d_model = {H_d.shape[2]}, got {shape_of(W)}")
    width, what = (W.shape[1], "d_model") if project_Q else (W.shape[0], "d")
    if Q.shape[-1] != width:
        raise ValueError(f"Q and W must be of the same {what}, got Q {shape_of(Q)} and W {shape_of(W)}")
    if b is not None and b.shape != W.shape[:1]:
        raise ValueError(f"b must be [d] with d = {W.shape[0]}, as W has it, got {shape_of(b)}")
    Q = Q.unsqueeze(0) if Q.dim() == 2 else Q
    return Q, check_mask("q_mask", q_mask, "Q", Q), check_mask("d_mask", d_mask, "H_d", H_d)
