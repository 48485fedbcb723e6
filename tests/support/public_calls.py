"""Small calls of public functions, with the arguments that are differentiated as leaves."""

from functools import partial

import torch
from torch.utils import _pytree as pytree

import late_interaction as li
from late_interaction import codecs, reference
from late_interaction.fused_head import maxsim_from_hidden
from late_interaction.lik import fp8, plaid
from late_interaction.lik.backward import maxsim_backward_lowmem, maxsim_backward_unified
from late_interaction.lik.forward import maxsim_forward
from late_interaction.lik.varlen import maxsim_varlen
from late_interaction.score_pairs import rerank_direct, score_pairs_packed
from tests.support.packed import pack_sequences

Nq, Lq, Nd, Ld, d, d_model = 2, 3, 4, 5, 8, 6


def of_tokens(Q, D, cu_q, cu_d, **options):
    return li.maxsim(li.Tokens.packed(Q, cu_q), li.Tokens.packed(D, cu_d), **options)


def calls():
    """{name: (function, arguments)}; the arguments that are differentiated require gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, grad=True):
        return torch.randn(*shape, generator=generator, requires_grad=grad)

    Q, D = normal(Nq, Lq, d), normal(Nd, Ld, d)
    masks = torch.rand(Nq, Lq, generator=generator) < 0.8, torch.rand(Nd, Ld, generator=generator) < 0.8
    flat = normal(Nq * Lq, d), normal(Nd * Ld, d)
    cu = torch.tensor([0, 3, 6]), torch.tensor([0, 5, 5, 14, 20])
    pairs = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 3])
    lengths = torch.tensor([2, 3]), torch.tensor([[4, 5], [1, 5]])
    own = normal(Nq, 2, Ld, d)
    H, W, b = normal(Nd, Ld, d_model), normal(d, d_model), normal(d)
    codes, residuals = torch.randint(7, (Nd, Ld)), torch.randint(256, (Nd, Ld, 2), dtype=torch.uint8)
    index = normal(7, d, grad=False), normal(4, grad=False), 2
    documents, offsets = torch.tensor([5, 4, 1, 2]), torch.tensor([0, 5, 6, 14, 20])
    q8, d8 = fp8.quantize_fp8_per_token(Q), fp8.quantize_fp8_per_token(D)
    codec = codecs.Residual(index[0], torch.zeros(3), index[1])
    kinds = codecs.Int8(), codecs.Bits(1), codecs.Bits(1, scales=False), codecs.Bits(4)
    q = Q.detach()
    best = torch.zeros(Nq * Nd, Lq, dtype=torch.int32)
    grads = normal(Nq, Nd, grad=False)

    def quantized(function):
        return lambda q, s, x, t: function(q, x, scale_Q=s, scale_D=t)

    return {
        "maxsim": (li.maxsim, (Q, D, *masks)),
        "maxsim high": (partial(li.maxsim, precision="high"), (Q, D)),
        "maxsim medium": (partial(li.maxsim, precision="medium", normalize=True), (Q, D)),
        "maxsim recompute": (partial(li.maxsim, winners="recompute"), (Q, D)),
        "maxsim_pairs": (partial(li.maxsim_pairs, precision="high"), (Q, own[:, 0])),
        "maxsim_with_winners": (li.maxsim_with_winners, (Q, D)),
        "maxsim_forward": (partial(maxsim_forward, save_argmax=True), (Q, D)),
        "lowmem": (maxsim_backward_lowmem, (grads, Q, D, best, masks[0])),
        "unified": (maxsim_backward_unified, (grads, Q, D, best)),
        "maxsim_varlen": (maxsim_varlen, (*flat, *cu)),
        "maxsim_varlen high": (partial(of_tokens, precision="high"), (*flat, *cu)),
        "score_pairs_packed": (score_pairs_packed, (*flat, *cu, *pairs)),
        "score_pairs_packed medium": (
            partial(score_pairs_packed, precision="medium", max_seqlen_q=3), (*flat, *cu, *pairs)
        ),
        "rerank_direct": (
            partial(rerank_direct, max_seqlen_d=7), (flat[0].detach(), flat[1].detach(), *lengths[1].int())
        ),
        "maxsim_padded": (li.lik.maxsim_padded, (Q, own, *lengths)),
        "smooth_maxsim": (partial(li.smooth_maxsim, tau=0.3), (Q, D, *masks)),
        "smooth_maxsim of own": (partial(li.smooth_maxsim, normalize=True), (Q, own)),
        "smooth_maxsim_pairs": (li.smooth_maxsim_pairs, (Q, own[:, 0], masks[0])),
        "xtr_scores": (partial(li.xtr_scores, precision="high"), (Q, D, 3, *masks)),
        "xtr_scores of own": (partial(li.xtr_scores, rule="pylate"), (Q, own, 3, masks[0])),
        "maxsim_from_hidden": (maxsim_from_hidden, (Q, H, W, b, masks[1])),
        "maxsim_from_hidden medium": (
            partial(maxsim_from_hidden, precision="medium", project_Q=True), (normal(Nq, Lq, d_model), H, W)
        ),
        "maxsim_residual": (plaid.maxsim_residual, (Q, codes, residuals, documents, *index)),
        "maxsim_residual_varlen": (
            plaid.maxsim_residual_varlen, (Q, codes.flatten(), residuals.flatten(0, 1), offsets, *index)
        ),
        "plaid_approx_score": (
            plaid.plaid_approx_score, (normal(7, Lq, grad=False), codes, documents)
        ),
        "reverse_bits": (codecs.reverse_bits, (residuals,)),
        "residual codes": (li.maxsim, (Q, li.Codes(codec, residuals, None, codes, masks[1]))),
        "residual pieces": (
            lambda codes: codes.codec.decode(codes), (li.Codes(codec, residuals, None, codes),)
        ),
        "fp8": (quantized(fp8.maxsim_inference_fp8), (*q8, *d8)),
        **{f"{kind}": (li.maxsim, (q, kind.encode(D))) for kind in kinds},
        **{f"encode {kind}": (lambda x, kind=kind: kind.encode(x), (D,)) for kind in kinds},
        "quantize fp8": (fp8.quantize_fp8_per_token, (Q,)),
        "quantize fp8 in all": (fp8.quantize_fp8_per_tensor, (Q,)),
        "search": (lambda *args: tuple(li.search(*args, chunk_bytes=8 * Ld * d)), (Q, D, 3)),
        "search high": (lambda *args: tuple(li.search(*args, precision="high")), (Q, D, 3)),
        "MaxSimScorer": (
            li.lik.MaxSimScorer(mask_pad_token=0).forward_with_ids, (Q, D, masks[0].long(), masks[1].long())
        ),
        "pack_sequences": (lambda *args: pack_sequences(args), (Q[0].detach(), D[0].detach())),
        "reference": (reference.maxsim_reference, (Q, D, *masks)),
        "reference of hidden": (reference.maxsim_from_hidden_reference, (Q, H, W, b)),
    }  # fmt: skip


CALLS = calls()


def with_gradients(function, args):
    """Results of a call, and gradients of its inputs, where it has any."""
    results = function(*args)
    scores = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor) and x.requires_grad]
    wanted = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf]
    if not scores:
        return results
    return results, torch.autograd.grad(scores[0].sum(), wanted, allow_unused=True)
