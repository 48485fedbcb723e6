"""Codes of packed documents: maxsim_quantized_packed, maxsim_asymmetric_packed and maxsim_hamming_packed."""

import itertools
import multiprocessing
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.maxsim.test_isa import check_at_page_ends
from tests.operators.test_bits import FORMS, int8_codes, laid, values
from tests.support import coded, ref
from tests.support.cases import QUANTIZED, code_limit, mask, tokens
from tests.support.packed import offsets

OPS = torch.ops.late_interaction
KINDS = [*QUANTIZED, "4 bits", "1 bit", "signs"]
LENGTHS = {
    "empty and short ones": [0, 1, 0, 2, 1, 0],
    "odd and prime": [13, 7, 31, 97, 3, 64, 61],
    "8 to 64": list(range(8, 65, 3)),
    "past a tile": [383, 384, 385, 0, 770, 1, 513],
    "long first": [1030, *[5] * 40],
    "empty alone": [0, 0, 0],
    "none": [],
}
QUERIES = [(1, 32), (3, 5), (2, 33), (1, 300), (40, 32), (2, 0), (0, 4)]
DIMS = [128, 16, 13, 96, 1, 320, 256]
CASES = [
    (kind, *case)
    for shift, kind in enumerate(KINDS)
    for case in zip(
        LENGTHS,
        itertools.islice(itertools.cycle(QUERIES), shift, None),
        itertools.islice(itertools.cycle(DIMS), 2 * shift, None),
        itertools.cycle(["none", "holes", "dead"]),
        strict=False,
    )
]


@dataclass
class Call:
    """A call on codes of one kind, without its mask and offsets."""

    kind: object
    d: int
    Q: Tensor
    D: Tensor
    scale_q: Tensor | None = None
    scale_d: Tensor | None = None

    @property
    def nbits(self):
        return 4 if self.kind == "4 bits" else 1

    def call(self, D, scale_d, q_mask, extents, packed=""):
        if self.kind == "signs":
            return getattr(OPS, f"maxsim_hamming{packed}")(self.Q, D, self.d, q_mask, extents)
        args = self.Q, D, self.scale_q, scale_d, q_mask, extents
        if isinstance(self.kind, torch.dtype):
            return getattr(OPS, f"maxsim_quantized{packed}")(*args)
        return getattr(OPS, f"maxsim_asymmetric{packed}")(*args, self.nbits)

    def scores(self, q_mask, cu_seqlens_d):
        return self.call(self.D, self.scale_d, q_mask, cu_seqlens_d, "_packed")

    def padded_scores(self, q_mask, cu_seqlens_d):
        """Scores of the padded operator, document by document."""
        found, scale = [self.Q.new_empty((self.Q.shape[0], 0), dtype=torch.float32)], self.scale_d
        for begin, end in itertools.pairwise(cu_seqlens_d.tolist()):
            own = scale[None, begin:end] if scale is not None and scale.dim() else scale
            d_mask = torch.ones(1, end - begin, dtype=torch.bool, device=self.Q.device)
            found.append(self.call(self.D[None, begin:end], own, q_mask, d_mask))
        return torch.cat(found, 1)

    def expected(self, q_mask, cu_seqlens_d):
        """Scores of what the codes stand for, in float64."""
        if isinstance(self.kind, torch.dtype):
            q, x = self.Q.double(), self.D.double()
        else:
            q = values(self.Q, 1, self.d) if self.kind == "signs" else self.Q.double()
            x = values(self.D, self.nbits, self.d)
        if self.kind != "signs":
            q, x = ref.dequantized(q, self.scale_q), ref.dequantized(x, self.scale_d)
        return ref.maxsim_of_packed(q, x, cu_seqlens_d, q_mask)

    def check(self, q_mask, cu_seqlens_d):
        found, device = self.scores(q_mask, cu_seqlens_d), self.Q.device.type
        limit = {"cpu": 5e-6, "cuda": 2e-3}[device]
        if device == "cuda" and isinstance(self.kind, torch.dtype):
            limit = max(limit, code_limit(self.kind))
        ref.assert_close(found, self.expected(q_mask, cu_seqlens_d), limit)
        return found


def make(kind, queries, count, d, device, form="contiguous", one_scale=False):
    """A call on `count` document tokens, which lie in memory as `form` says."""
    if isinstance(kind, torch.dtype):
        Q, D = tokens((*queries, d), kind, device), tokens((count, d), kind, device)
    else:
        nbits = 4 if kind == "4 bits" else 1
        Q = coded.packed(queries, d, 1, device) if kind == "signs" else int8_codes((*queries, d), device)
        D = coded.packed((count,), d, nbits, device)
    scales = [torch.rand(queries, device=device), torch.rand(count, device=device)]
    if one_scale:
        scales = [torch.tensor(0.75, device=device)] * 2
    bits = (laid(x.view(torch.uint8), form).view(x.dtype) for x in (Q, D))
    return Call(kind, d, *bits, *(() if kind == "signs" else scales))


@pytest.mark.parametrize(("kind", "name", "queries", "d", "masks"), CASES, ids=str)
def test_scores(kind, name, queries, d, masks, device):
    """Tokens in front of the first document and behind the last belong to none."""
    stray = 3 if masks == "holes" else 0
    cu = offsets(LENGTHS[name], stray).to(device)
    call = make(kind, queries, int(cu[-1]) + stray, d, device, one_scale=masks == "dead")
    q_mask = mask(queries, device, masks)
    found = call.check(q_mask, cu)
    assert found.dtype == torch.float32 and found.shape == (queries[0], len(LENGTHS[name]))
    if device == "cpu":
        assert torch.equal(found, call.padded_scores(q_mask, cu))


RUNS = {
    "fewer documents than warps": [5, 0, 33, 1, 97],
    "one document": [1],
    "one long one": [3, 9000, 2],
    "many in a tile": [k % 4 for k in range(5000)],
    "of every length": [53 * k % 211 for k in range(4000)],
    "empty ones in a row": ([0] * 70 + [31]) * 90,
}


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [(1, 32), (1, 1), (3, 7), (4, 8)])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", QUANTIZED, ids=str)
def test_warps_stream_runs_of_documents(kind, name, queries, force):
    """A tile has tokens of several documents; a bad scale is the fault of its own document alone."""
    stray = 13 if queries == (3, 7) else 0
    cu = offsets(RUNS[name], stray).cuda()
    call = make(kind, queries, int(cu[-1]) + stray, 128, "cuda", one_scale=queries == (1, 1))
    force("codes stream")
    q_mask = mask(queries, torch.device("cuda"), "holes" if stray else "none")
    found = call.check(q_mask, cu)
    assert torch.equal(call.scores(q_mask, cu), found)
    if call.scale_d.dim():
        longest = int(cu.diff().argmax())
        call.scale_d[int(cu[longest + 1]) - 1] = float("nan")
        found[:, longest] = float("nan")
        torch.testing.assert_close(call.scores(q_mask, cu), found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_may_lie_anywhere(kind, form, device):
    cu = offsets(LENGTHS["odd and prime"]).to(device)
    for d in (128, 40):
        call = make(kind, (3, 9), int(cu[-1]), d, device, form)
        if kind != "signs":
            call.scale_d = torch.stack((call.scale_d, -call.scale_d), 1)[:, 0]
            call.scale_q = call.scale_q.T.contiguous().T
        call.check(mask((3, 9), device, "holes"), cu)


@pytest.mark.parametrize("kind", KINDS[:-1], ids=str)
def test_a_scale_of_minus_zero_is_zero(kind, device):
    cu = offsets([4, 0, 9, 5]).to(device)
    call = make(kind, (2, 5), int(cu[-1]), 32, device)
    call.scale_d[4 + 3] = 0.0
    found = call.scores(None, cu)
    call.scale_d[4 + 3] = -0.0
    assert torch.equal(call.scores(None, cu), found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("kind", KINDS[:-1], ids=str)
def test_bad_scales_make_nan(kind, bad, device):
    cu = offsets([4, 0, 9, 5], 2).to(device)
    call = make(kind, (2, 5), int(cu[-1]) + 2, 32, device)
    before = call.scores(None, cu)
    for stray in (0, -1):
        call.scale_d[stray] = bad
    assert torch.equal(call.scores(None, cu), before)
    call.scale_d[2 + 4 + 3] = bad
    found = call.scores(None, cu)
    assert found[:, 2].isnan().all() and torch.equal(found[:, [0, 1, 3]], before[:, [0, 1, 3]])
    call.scale_q[1, 3] = bad
    found = call.scores(None, cu)
    assert found[1, [0, 2, 3]].isnan().all() and (found[:, 1] == 0).all()
    assert torch.equal(found[0, [0, 1, 3]], before[0, [0, 1, 3]])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_instruction_set_reads_no_further_than_the_last_token(kind, isa):
    for lengths, d in (([7, 1, 33], 128), ([5, 0, 12, 13], 64), ([2, 385], 100), ([1], 1), ([3, 31], 31)):
        call, cu = make(kind, (2, 33), sum(lengths), d, "cpu"), offsets(lengths)
        call.check(None, cu)
        given = [x for x in (call.Q, call.D, call.scale_q, call.scale_d) if x is not None]
        check_at_page_ends(lambda *x, d=d: (Call(kind, d, *x[1:]).scores(None, x[0]),), cu, *given)


def scores_by(threads, call, cu):
    torch.set_num_threads(threads)
    return call.scores(None, cu)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_threads_give_the_same_bits(kind):
    """Documents of every order of lengths, which threads share by tokens."""
    lengths = torch.randint(0, 90, (700,))
    for order in (lengths, lengths.sort().values, torch.tensor([*[1] * 300, 9000, 0, 0])):
        cu = offsets(order.tolist())
        call = make(kind, (1, 32), int(cu[-1]), 128, "cpu")
        found = [scores_by(threads, call, cu) for threads in (1, 2, 3)]
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        assert torch.equal(found[0], call.padded_scores(None, cu))


def put_scores(queue, call, cu):
    torch.set_num_threads(1)  # as PyTorch's own workers do: the threads of OpenMP are not forked
    queue.put(call.scores(None, cu).tolist())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_scores():
    cu = offsets([5, 0, 70, 300] * 50)
    call = make(torch.int8, (2, 32), int(cu[-1]), 128, "cpu")
    wanted = call.scores(None, cu)
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    child = fork.Process(target=put_scores, args=(queue, call, cu))
    child.start()
    assert queue.get() == wanted.tolist()
    child.join()


GOOD = {"Q": torch.ones(2, 3, 16, dtype=torch.int8), "D": torch.ones(7, 16, dtype=torch.int8),
        "scale_Q": torch.ones(2, 3), "scale_D": torch.ones(7), "q_mask": None,
        "cu_seqlens_d": torch.tensor([0, 4, 7], dtype=torch.int32)}  # fmt: skip


def cu(*numbers, dtype=torch.int32):
    return {"cu_seqlens_d": torch.tensor(numbers, dtype=dtype)}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (cu(0, 5, 4), r"cu_seqlens_d must not decrease .*cu_seqlens_d\[2\] = 4 after 5"),
        (cu(-1, 5), r"cu_seqlens_d must .*lie within \[0, 7\].*cu_seqlens_d\[0\] = -1"),
        (cu(0, 8), r"cu_seqlens_d must .*lie within \[0, 7\].*cu_seqlens_d\[1\] = 8"),
        (cu(0, 7, dtype=torch.int64), "cu_seqlens_d must be a contiguous int32"),
        ({"cu_seqlens_d": torch.tensor(0, dtype=torch.int32)}, "cu_seqlens_d must be a contiguous int32"),
        (cu(), "cu_seqlens_d must be .* not empty"),
        ({"cu_seqlens_d": torch.zeros(6, dtype=torch.int32)[::2]}, "cu_seqlens_d must be a contiguous int32"),
        ({"D": torch.ones(1, 7, 16, dtype=torch.int8)}, r"D must be \[tokens, d\], got rank 3"),
        ({"D": torch.ones(7, 15, dtype=torch.int8)}, "Q and D must share d, got 16 and 15"),
        ({"Q": torch.ones(3, 16, dtype=torch.int8)}, r"Q must be \[Nq, Lq, d\], got rank 2"),
        ({"D": torch.ones(7, 16)}, "Q and D must share a dtype"),
        ({"scale_D": torch.ones(1, 7)}, r"scale_D must be 0-dim or \[tokens\], got rank 2"),
        ({"scale_D": torch.ones(6)}, "scale_D must be 0-dim or have the shape of its tokens"),
        ({"q_mask": torch.ones(2, 4, dtype=torch.bool)}, "q_mask must have the shape of its tokens"),
    ],
)  # fmt: skip
def test_what_is_refused(bad, words):
    with pytest.raises(RuntimeError, match=words):
        OPS.maxsim_quantized_packed(*(GOOD | bad).values())


def test_what_packed_codes_refuse():
    bits, cu_seqlens_d = torch.ones(7, 2, dtype=torch.uint8), GOOD["cu_seqlens_d"]
    with pytest.raises(RuntimeError, match="D must have 8 bytes a token for 16 codes of 4 bits, got 2"):
        OPS.maxsim_asymmetric_packed(*(GOOD | {"D": bits}).values(), 4)
    with pytest.raises(RuntimeError, match="nbits must be 1 or 4, got 2"):
        OPS.maxsim_asymmetric_packed(*(GOOD | {"D": bits}).values(), 2)
    with pytest.raises(RuntimeError, match="Q must have 3 bytes a token for 17 codes"):
        OPS.maxsim_hamming_packed(bits[:3].view(1, 3, 2), bits, 17, None, cu_seqlens_d)
    with pytest.raises(RuntimeError, match=r"cu_seqlens_d must not decrease"):
        OPS.maxsim_hamming_packed(bits[:3].view(1, 3, 2), bits, 16, None, cu_seqlens_d.flip(0))


def test_the_fake_kernel_names_offsets_that_are_no_list():
    meta = [x if x is None else x.to("meta") for x in GOOD.values()]
    assert OPS.maxsim_quantized_packed(*meta).shape == (2, 2)
    with pytest.raises(RuntimeError, match="cu_seqlens_d must be 1-D, got 0 dims"):
        OPS.maxsim_quantized_packed(*meta[:-1], meta[-1].sum())
    with pytest.raises(RuntimeError, match=r"Q must be \[Nq, Lq, d\], got rank 2"):
        OPS.maxsim_quantized_packed(meta[0][0], *meta[1:])
