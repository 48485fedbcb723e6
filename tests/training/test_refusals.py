"""Bad arguments of losses are a TypeError or ValueError that names the argument."""

import pytest
import torch
import torch.distributed as dist

import late_interaction as li
from tests.support.groups import needs_gloo

Q, D = torch.randn(4, 3, 8), torch.randn(5, 5, 8)
H, OWN, TEACHER = torch.randn(4, 2, 4, 8), torch.randn(4, 6, 7, 8), torch.randn(4, 6)
ROWS, COLUMNS = torch.tensor([0, 4]), torch.tensor([0, 1])
GOOD = {"Q": Q, "D": D, "temperature": 0.3}
OF_LISTS = {"Q": Q, "D": OWN, "teacher": TEACHER}
EVERY = li.losses.contrastive, li.losses.pairwise, li.losses.sigmoid, li.losses.recall
PADDED = r"must be \[B, L, d\], Tokens or a list, got \[1, {}, {}, 8\]"
OF_EVERY = [
    (TypeError, "Q must be a torch.Tensor", {"Q": None}),
    (ValueError, "Q must be .B, L, d.", {"Q": Q[0]}),
    (ValueError, "labels must say", {"D": D[:3]}),
    (ValueError, "temperature must be above 0", {"temperature": -1.0}),
    (ValueError, "reduction must be one of", {"reduction": "median"}),
    (ValueError, "D must hold at least one document", {"Q": Q[:0], "D": D[:0]}),
]
OF_CONTRASTIVE = [
    (ValueError, "Q " + PADDED.format(4, 3), {"Q": Q[None]}),
    (ValueError, "D " + PADDED.format(5, 5), {"D": D[None]}),
    (TypeError, "D must be bfloat16", {"D": D.int()}),
    (TypeError, "must share a dtype", {"D": D.double()}),
    (ValueError, "embedding dim", {"D": D[..., :4]}),
    *((ValueError, "temperature must be above 0, got", {"temperature": value}) for value in (
        0.0, float("nan"), 10**400, torch.tensor(0.0), torch.tensor([-2.0]),
    )),
    (TypeError, "temperature must be a float", {"temperature": "warm"}),
    (ValueError, "temperature must be", {"temperature": torch.ones(2)}),
    (ValueError, "temperature must be", {"temperature": torch.tensor(1)}),
    (TypeError, "symmetric must be True or False", {"symmetric": 1}),
    (TypeError, "scale_by_world must be True or False", {"scale_by_world": None}),
    (ValueError, "label_smoothing must lie", {"label_smoothing": 1.0}),
    (TypeError, "tail must be a float", {"tail": "long"}),
    (ValueError, "tail must lie", {"tail": -0.1}),
    (ValueError, "tail must lie", {"tail": 1}),
    (ValueError, "tail must be 0 with label_smoothing", {"tail": 0.1, "label_smoothing": 0.1}),
    (ValueError, "precision must be one of", {"precision": "low"}),
    (ValueError, "kept_bytes must be at least 0, got -1", {"kept_bytes": -1}),
    (TypeError, "kept_bytes must be an int or None, got float", {"kept_bytes": 1.5}),
    # hard negatives
    (ValueError, "hard_negatives must be", {"hard_negatives": D}),
    (TypeError, "hard_negatives must be a torch.Tensor", {"hard_negatives": D.numpy()}),
    (ValueError, r"hard_negatives\[0\] must be \[L, 8\]", {"hard_negatives": [D]}),
    (TypeError, "hard_negatives must be bfloat16", {"hard_negatives": H.int()}),
    (TypeError, "Q and hard_negatives must share a dtype", {"hard_negatives": H.double()}),
    (ValueError, "Q and hard_negatives must share an embedding dim", {"hard_negatives": H[..., :7]}),
    (ValueError, "hard_negatives must hold as many", {"hard_negatives": [*H[:3, 0]]}),
    *((ValueError, r"hard_negatives must be \[B, K, Ld, d\]", {"hard_negatives": x}) for x in (
        H[..., None], H[:3], torch.cat((H, H[:1])),
    )),
    (ValueError, "candidate_mask must be None without hard_negatives",
     {"candidate_mask": torch.ones(4, 0).bool()}),
    (ValueError, r"candidate_mask must be \[B, K\] = \[4, 2\]",
     {"hard_negatives": H, "candidate_mask": torch.ones(4, 3).bool()}),
    *((TypeError, "candidate_mask must be", {"hard_negatives": H, "candidate_mask": x}) for x in (
        [[True, True]] * 4, torch.ones(4, 2),
    )),
    # labels, and what is left out
    *((ValueError, rf"labels must lie in \[0, 5\), or be -100 .*, got .*{label}",
       {"labels": torch.tensor([0, label, 2, 3])}) for label in (-1, -99, -101, 5)),
    (TypeError, "labels must be int64", {"labels": torch.ones(4)}),
    (TypeError, "labels must be int64", {"labels": (ROWS, COLUMNS.float())}),
    (TypeError, "labels must hold a list of ints for each query", {"labels": [0, 1, 2, 3]}),
    (TypeError, "labels must hold a list of ints for each query, got", {"labels": [[0], [1], [1.5], []]}),
    (TypeError, "labels must be a torch.Tensor, two of them", {"labels": 3}),
    (ValueError, r"labels must lie in \[0, 5\), .* labels\[1, 1\] = 5", {"labels": [[0], [1, 5], [2], []]}),
    (ValueError, r"labels must lie in \[0, 5\), .* labels\[2, 0\] = -1", {"labels": [[0], [1], [-1], []]}),
    (ValueError, "labels must hold a list for each of the 4 queries, got 2", {"labels": [[0], [1]]}),
    (ValueError, r"labels must be \[4\] or \[4, P\], got \[3\]", {"labels": torch.arange(3)}),
    (ValueError, r"labels must be \[4\] or \[4, P\], got \[2, 2\]", {"labels": torch.zeros(2, 2).long()}),
    (ValueError, r"labels must name queries in \[0, 4\), got .* labels\[0\]\[1\] = 4",
     {"labels": (ROWS, COLUMNS)}),
    (ValueError, r"labels as pairs must be two tensors \[n\]", {"labels": (ROWS, COLUMNS[:1])}),
    (ValueError, r"exclude must lie in \[0, 5\)", {"exclude": [[0], [1], [5], []]}),
    (ValueError, r"exclude must be \[Nq, Nd\] = \[4, 5\]", {"exclude": torch.ones(4, 4).bool()}),
    (TypeError, "exclude must be int64", {"exclude": torch.ones(4, 5)}),
    (TypeError, "exclude_above must be a float", {"exclude_above": True}),
    (ValueError, "exclude_above must be finite", {"exclude_above": float("inf")}),
    (ValueError, "multi_positive must be one of", {"multi_positive": "all"}),
]  # fmt: skip
OF_SIGMOID = [
    (TypeError, "bias must be a float", {"bias": "none"}),
    (TypeError, "bias must be a float", {"bias": True}),
    (ValueError, "bias must be finite", {"bias": float("inf")}),
    (ValueError, "bias must be a float or one", {"bias": torch.ones(2)}),
    (ValueError, "bias must be a float or one", {"bias": torch.ones(0)}),
]
OF_RECALL = [
    (TypeError, "k must be an int", {"k": 1.5}),
    *((ValueError, "k must be a positive int or a non-empty sequence", {"k": k}) for k in ((1, 0), (), True)),
    (ValueError, "rank_temperature must be above 0", {"rank_temperature": 0}),
    (ValueError, "temperature must not require", {"temperature": torch.tensor(0.5, requires_grad=True)}),
    (ValueError, "^mixup must be at least 2, got 1", {"mixup": 1}),
    (TypeError, "^mixup must be an int or None, got", {"mixup": 2.0}),
    (TypeError, "^generator must be a torch.Generator or None, got int", {"mixup": 2, "generator": 3}),
    (ValueError, "^generator must be None without mixup", {"generator": torch.Generator()}),
    (ValueError, '^mixup must be None with reduction="none"', {"mixup": 2, "reduction": "none"}),
]
OF_DISTILLATION = [
    (TypeError, "Q must be a torch.Tensor", {"Q": None}),
    (TypeError, "teacher must be a torch.Tensor", {"teacher": [1.0]}),
    (TypeError, "teacher must be floating point", {"teacher": TEACHER.long()}),
    (ValueError, r"teacher must be \[B, K\] = \[4, 6\]", {"teacher": TEACHER[:, :2]}),
    (ValueError, "D must hold", {"D": OWN[:, :1], "teacher": TEACHER[:, :1]}),
    (ValueError, "reduction must be one of", {"reduction": "batchmean"}),
    (TypeError, "normalize must be", {"normalize": 1}),
    (TypeError, "normalize must be", {"Q": [*Q], "normalize": 1}),
    (TypeError, "candidate_mask must be a torch.Tensor or None", {"candidate_mask": [[True] * 6] * 4}),
    (TypeError, "candidate_mask must be a dense bool", {"candidate_mask": torch.ones(4, 6)}),
    (ValueError, r"candidate_mask must be \[B, K\] = \[4, 6\], got",
     {"candidate_mask": torch.ones(4, 6, 7).bool()}),
    (ValueError, "as many documents for each of the 4 queries, got 23",
     {"D": li.Tokens(OWN.flatten(0, 1))[:23]}),
    (ValueError, "with the B of Q", {"D": OWN[:3]}),
    (ValueError, "Q must be .* d of at least 1", {"Q": Q[..., :0], "D": OWN[..., :0]}),
    *((ValueError, r"Q must be \[B, Lq, d\] and D \[B, K, Ld, d\]", bad) for bad in (
        {"Q": Q[0]}, {"D": OWN[:, 0]}, {"Q": Q[None]}, {"D": OWN[None]},
    )),
]  # fmt: skip
OF_KL = [
    (ValueError, "temperature must be above 0", {"temperature": 0.0}),
    (TypeError, "temperature must be a float", {"temperature": TEACHER}),
    (ValueError, "teacher_temperature must be", {"teacher_temperature": -1}),
    (TypeError, "normalize_scores must be", {"normalize_scores": "min-max"}),
    (ValueError, "normalize_scores must be False with 2 documents",
     {"D": OWN[:, :2], "teacher": TEACHER[:, :2], "normalize_scores": True}),
]  # fmt: skip
BAD = [
    *((loss, GOOD, *row) for row in OF_EVERY for loss in EVERY),
    *((li.losses.contrastive, GOOD, *row) for row in OF_CONTRASTIVE),
    *((li.losses.sigmoid, GOOD, *row) for row in OF_SIGMOID),
    *((li.losses.recall, GOOD, *row) for row in OF_RECALL),
    *((loss, OF_LISTS, *row) for row in OF_DISTILLATION
      for loss in (li.losses.distill_kl_div, li.losses.margin_mse)),
    *((li.losses.distill_kl_div, OF_LISTS, *row) for row in OF_KL),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "good", "error", "message", "bad"), BAD)
def test_what_losses_refuse(loss, good, error, message, bad):
    loss(**good)
    with pytest.raises(error, match=message):
        loss(**good | bad)


@needs_gloo
def test_no_mixup_over_a_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"^mixup must be None with group"):
            li.losses.recall(Q, D, mixup=2, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
