"""Arguments close to what is wanted: arrays for numbers, numbers beyond int64, tensors without values."""

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction import Corpus, codecs
from late_interaction.integrations import vllm
from late_interaction.lik import forward
from late_interaction.score_pairs import rerank_direct

Q, D = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
KD, OFFSETS = torch.ones(2, 2, 5, 4), torch.tensor([0, 4, 9])
TOKENS = torch.eye(9)[:, :4] + 0.1
INDICES = torch.zeros(2, 1, dtype=torch.int64)
CODEC = codecs.Residual(torch.eye(4), torch.zeros(1), torch.tensor([-0.1, 0.1]))
CODES = CODEC.encode(D)
EXACT = li.SearchResult(torch.ones(2, 1), INDICES)
TEXTS = {"a": ["x", "y"], "b": ["u", "v"]}
FOUND = li.TopK(Q, 1)
FOUND.add(D)


def resumed(**state):
    li.TopK(Q, 1).load_state_dict(FOUND.state_dict() | state)


def restored(**state):
    li.Muvera.from_state_dict(MUVERA.state_dict() | state)


MUVERA = li.Muvera(4, k_sim=1, repetitions=1)
PAIR = {"Q": Q, "D": D}
SPANS = {"queries": [Q[0]], "hidden": TOKENS, "doc_offsets": [0], "doc_lengths": [2]}
EMBEDDED = {"q_embs": [Q[0]], "d_embs": [D[0]]}
META = TOKENS.to("meta")
NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
# A function, its good arguments, and of one of them a value that is refused by name.
REFUSED = [
    *[(li.maxsim, PAIR, name, ["x"], ValueError) for name in ("backward", "precision", "winners")],
    *[(li.maxsim, PAIR, name, np.ones(2), ValueError) for name in ("backward", "precision", "winners")],
    (li.maxsim_pairs, PAIR, "precision", np.ones(2), ValueError),
    *[
        (function, PAIR | {"temperature": 1.0}, "temperature", 10**309, ValueError)
        for function in (li.losses.contrastive, li.losses.pairwise, li.losses.sigmoid, li.losses.recall)
    ],
    (li.losses.Contrastive, {}, "temperature", 10**309, ValueError),
    (li.smooth_maxsim, PAIR, "tau", 10**309, ValueError),
    (li.smooth_maxsim_pairs, PAIR, "tau", 10**309, ValueError),
    *[(li.losses.contrastive, PAIR | {"temperature": 1.0}, "group", bad, TypeError) for bad in (5, "x", Q)],
    (li.search, PAIR | {"k": 1}, "group", [], TypeError),
    (li.search, PAIR | {"k": 1}, "progress", "bar", TypeError),
    (li.maxsim, PAIR, "precision", NESTED, ValueError),
    (li.hard_negatives, PAIR | {"positives": [[0], [1]]}, "positives", INDICES.to("meta"), ValueError),
    (li.hard_negatives, PAIR | {"positives": [[0], [1]]}, "positives", INDICES.to_sparse(), TypeError),
    (li.hard_negatives, PAIR | {"positives": [[0], [1]]}, "sampling_strategy", np.ones(2), ValueError),
    (li.hard_negatives, PAIR | {"positives": [[0], [1]]}, "D", D.to("meta"), ValueError),
    (li.hard_negatives, PAIR | {"positives": [[0], [1]]}, "D", D[..., :0], ValueError),
    (li.plot_alignment, {"alignment": li.explain(Q[0], D[0])}, "ax", "x", TypeError),
    (li.xtr_scores, PAIR | {"k": 1}, "k", np.ones(2, int), TypeError),
    (li.xtr_scores, PAIR | {"k": 1}, "rule", np.ones(2), ValueError),
    (li.xtr_scores, PAIR | {"k": 1}, "q_weights", torch.ones(2, 3).to_sparse(), TypeError),
    (li.search, PAIR | {"k": 1}, "k", np.ones(2, int), TypeError),
    (li.TopK, {"Q": Q, "k": 1}, "first", np.ones(2, int), TypeError),
    (forward.maxsim_forward, PAIR, "save_argmax", 1, TypeError),
    (rerank_direct,
     {"Q": Q[0], "batch_tensor": TOKENS, "doc_offsets": OFFSETS[:1], "doc_lengths": OFFSETS[:1]},
     "max_seqlen_d", np.ones(2, int), TypeError),
    (li.search, PAIR | {"k": 1}, "coarse", {}, TypeError),
    (codecs.Bits, {"nbits": 4}, "nbits", True, ValueError),
    (codecs.Bits, {"nbits": 4}, "nbits", np.ones(2), ValueError),
    (codecs.Fp8, {}, "dtype", np.ones(2), TypeError),
    (li.pool_tokens, {"D": D}, "method", np.ones(2), ValueError),
    (li.Muvera, {"d": 4}, "seed", np.ones(2, int), TypeError),
    (li.Muvera, {"d": 4, "d_proj": 2}, "d", 2**70, ValueError),
    (restored, {}, "hyperplanes", 1, TypeError),
    (restored, {}, "hyperplanes", torch.ones(1, 4, device="meta"), ValueError),
    (restored, {}, "parameters", torch.ones(7, device="meta"), ValueError),
    (resumed, {}, "scores", FOUND.scores.to("meta"), ValueError),
    (resumed, {}, "ranges", torch.ones(0), TypeError),
    (codecs.Residual.train, {"tokens": TOKENS}, "seed", 2**70, ValueError),
    (codecs.Residual.train, {"tokens": TOKENS}, "dtype", np.ones(2), TypeError),
    (codecs.Residual.train, {"tokens": TOKENS}, "tokens", META, ValueError),
    (li.Codes, {"codec": CODEC, "values": CODES.values, "centroids": CODES.centroids}, "d", 1.0, TypeError),
    (li.explain, PAIR | {"documents": INDICES}, "documents", INDICES.to("meta"), ValueError),
    (Corpus.from_packed, {"tokens": TOKENS, "offsets": OFFSETS}, "offsets", OFFSETS.to("meta"), ValueError),
    (li.evaluate_recall, {"found": INDICES, "exact": EXACT, "k": 1}, "found", INDICES.to("meta"), ValueError),
    (li.evaluate_recall, {"found": INDICES, "exact": EXACT, "k": 1}, "exact",
     li.SearchResult(EXACT.scores.to("meta"), EXACT.indices), ValueError),
    (li.evaluate_recall, {"found": INDICES, "exact": EXACT, "k": 1}, "k", None, TypeError),
    (li.evaluate_recall, {"found": INDICES, "exact": EXACT, "k": 1}, "k", b"x", TypeError),
    (li.evaluate_recall, {"found": INDICES, "exact": EXACT, "k": 1}, "k", [], ValueError),
    *[(li.reference.maxsim_from_hidden_reference, {"Q": Q, "H_d": D, "W": torch.eye(4)}, name, bad, error)
      for name, bad, error in (("Q", None, TypeError), ("H_d", D.int(), TypeError),
                                       ("W", META, ValueError), ("d_mask", D[0, :, 0] > 0, ValueError))],
    (CODEC.encode, {"tokens": TOKENS}, "tokens", torch.ones(0), ValueError),
    (li.pool_tokens, {"D": D}, "D", [META], ValueError),
    (li.losses.contrastive, PAIR | {"temperature": 1.0}, "reduction", np.ones(2), ValueError),
    (li.losses.contrastive, PAIR | {"temperature": 1.0}, "kept_bytes", np.ones(2, int), TypeError),
    (li.losses.sigmoid, PAIR | {"temperature": 1.0}, "bias", 10**309, ValueError),
    *[(loss, PAIR | {"temperature": 1.0}, "temperature", torch.tensor(value), ValueError)
      for loss in (li.losses.contrastive, li.losses.sigmoid) for value in (-1.0, 0.0)],
    (li.lik.MaxSimScorer, {}, "mask_pad_token", 2**63, ValueError),
    (li.losses.Contrastive, {}, "learnable", None, TypeError),
    (li.losses.distill_kl_div, {"Q": Q, "D": KD, "teacher": torch.ones(2, 2)}, "teacher",
     torch.ones(2, 2).to_sparse(), TypeError),
    (li.hard_negatives, {"Q": Q, "D": D, "positives": [[0], [1]]}, "num_negatives", 2**70, ValueError),
    (li.hard_negatives, {"Q": Q, "D": D, "positives": [[0], [1]]}, "max_score", 2**70, ValueError),
    (li.hard_negatives, {"Q": Q, "D": D, "positives": [[0], [1]]}, "seed", 2**70, ValueError),
    (li.mine_hard_negatives, {"dataset": TEXTS, "model": None}, "output_format", np.ones(2), ValueError),
    (vllm.compute_maxsim_score_offsets, SPANS, "doc_offsets", None, TypeError),
    (vllm.compute_maxsim_score_offsets, SPANS, "doc_lengths", [1.5], TypeError),
    (vllm.compute_maxsim_score_batched, EMBEDDED, "d_embs", 3, TypeError),
    (vllm.compute_maxsim_score_batched, EMBEDDED, "d_embs", [3], TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("function", "good", "name", "bad", "error"), REFUSED)
def test_what_is_refused_by_name(function, good, name, bad, error):
    with pytest.raises(error, match=rf"(^|\W){name}\W") as caught:
        function(**good | {name: bad})
    assert "ambiguous" not in str(caught.value)


def test_numbers_beyond_int64_are_more_than_there_are():
    assert torch.equal(li.xtr_scores(Q, D, 2**70), li.xtr_scores(Q, D, 10))
    assert torch.equal(
        li.pool_tokens(TOKENS, method="kmeans", iterations=2**70),
        li.pool_tokens(TOKENS, method="kmeans", iterations=99),
    )
    assert torch.equal(li.losses.recall(Q, D, k=2**70, temperature=1.0), torch.tensor(0.0))
    found = li.hard_negatives(Q, D, [[0], [1]], num_negatives=1, range_max=2**70)
    assert found.indices.tolist() == [[1], [0]]
    assert torch.equal(li.search(Q, D, 2**70).indices, li.search(Q, D, len(D)).indices)


def test_a_name_of_a_column_is_not_exchanged_for_another():
    for name in ("", 0, []):
        with pytest.raises(ValueError, match="dataset must have a column"):
            li.mine_hard_negatives(TEXTS, None, anchor_column_name=name)


def test_operators_called_by_themselves():
    """What reaches PyTorch or a kernel from here would end the process."""
    ward = torch.ops.late_interaction.ward_labels
    with pytest.raises(RuntimeError, match="tau must be above 0 and finite"):
        torch.ops.late_interaction.smooth_maxsim(Q, D, None, None, torch.inf)
    empty = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="clusters must be at least 1, got -5"):
        ward(TOKENS, empty, torch.tensor([2, -5, 2], dtype=torch.int32))
    labels, found = ward(TOKENS, empty, torch.tensor([2, 0, 2], dtype=torch.int32))
    assert found[1] == 0 and len(labels) == 9
    with pytest.raises(RuntimeError, match="clusters must be at least 1, got -1"):
        one = torch.tensor([-1], dtype=torch.int32)
        torch.ops.late_interaction.ward_cut_(
            torch.ones(0), torch.zeros(2).int(), one, 0, torch.ones(0).int(), one.clone()
        )
