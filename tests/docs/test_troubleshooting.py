"""docs/troubleshooting.md: what its headings quote is what the package says."""

import pickle
import re
import sys
from pathlib import Path

import pytest
import torch

import late_interaction as li
from late_interaction import Corpus
from late_interaction._scoring import norm_warning
from late_interaction.lik import plaid
from late_interaction.score_pairs import rerank_direct
from tests.docs.test_docs import without
from tests.support.programs import ROOT, python
from tests.training.test_contrastive_group import on_ranks

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
DOCUMENTS = torch.nn.functional.normalize(torch.ones(4, 5, 8), dim=-1)
# Another allocator's words, which no test here should provoke.
NOT_OURS = {"CUDA out of memory"}


def ours(*shape, dtype=torch.float32, grad=False):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1).to(dtype).requires_grad_(grad)


def scored(Q, **options):
    return li.maxsim(Q, DOCUMENTS, **options)


def packed(offsets):
    return li.lik.maxsim_varlen(ours(6, 8), ours(20, 8), torch.tensor([0, 3, 6]), torch.tensor(offsets))


def differentiated_twice():
    Q = ours(2, 3, 8, grad=True)
    (grad,) = torch.autograd.grad(li.smooth_maxsim(Q, ours(4, 5, 8)).sum(), Q, create_graph=True)
    grad.sum().backward()


def an_empty_compressed_document():
    residuals, lengths = torch.zeros(1, 4, 2, dtype=torch.uint8), torch.tensor([0])
    codes, weights = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(4)
    plaid.maxsim_residual(ours(3, 8, grad=True), codes, residuals, lengths, ours(2, 8), weights, 2)


def with_module(monkeypatch, name):
    """A module that cannot be imported."""
    monkeypatch.setitem(sys.modules, name, None)


def without_pylate(monkeypatch):
    from late_interaction.integrations._shared import compat as _compat

    for name in [name for name in sys.modules if name.split(".")[0] == "pylate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(_compat, "installed_release", lambda package: None)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "pylate" not in path])
    li.patch("pylate")


def without_tqdm(monkeypatch):
    with_module(monkeypatch, "tqdm")
    li.search(ours(1, 3, 8), ours(4, 5, 8), 2, progress=True)


def without_norms(monkeypatch):
    monkeypatch.delenv("LIK_SUPPRESS_NORM_WARN", raising=False)
    norm_warning.looked.clear()
    scored(10 * ours(2, 3, 8))


def in_another_process(library, call):
    def run():
        done = python("-c", without(library) + call)
        raise RuntimeError(done.stderr.strip().splitlines()[-1].partition(": ")[2])

    return run


def a_lost_rank():
    if not torch.distributed.is_available():
        pytest.skip("needs torch.distributed")
    result = on_ranks(2, "one_ends", timeout=10, missing=1, when="forward")[0]
    raise RuntimeError(result.partition(": ")[2])


def damaged(folder, change):
    """Opens a corpus of which a file was changed."""
    with Corpus.create(folder / "corpus", d=8) as builder:
        builder.add([ours(3, 8)])
    file = folder / "corpus" / "shard-00000.tokens"
    file.write_bytes(change(file.read_bytes()))
    Corpus.open(folder / "corpus", verify=True)


def not_finished(tmp_path):
    Corpus.create(tmp_path / "corpus", d=8).flush()
    Corpus.open(tmp_path / "corpus")


def cut_short(tmp_path):
    damaged(tmp_path, lambda data: data[:-1])


def changed(tmp_path):
    damaged(tmp_path, lambda data: data[:-1] + b"?")


def two_writers(tmp_path):
    with Corpus.create(tmp_path / "corpus", d=8):
        Corpus.create(tmp_path / "corpus", d=8, resume=True)


def compacted(tmp_path):
    with Corpus.create(tmp_path / "corpus", d=8) as builder:
        builder.add([ours(3, 8)] * 2)
    corpus = Corpus.open(tmp_path / "corpus")
    text = pickle.dumps(corpus)
    corpus.delete([0])
    corpus.compact()
    pickle.loads(text)


def a_full_disk(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    with Corpus.create(tmp_path / "corpus", d=8) as builder:
        (tmp_path / "corpus" / "shard-00000.tokens").symlink_to("/dev/full")
        builder.add([ours(3, 8)])


# By the beginning of a heading: what says so.
CASES = {
    "Q and D must share a dtype": lambda: li.maxsim(ours(2, 3, 8), ours(4, 5, 8, dtype=torch.bfloat16)),
    "Q and D must be on the same device": lambda: scored(ours(2, 3, 8).to("meta")),
    "Q and D must share an embedding dim": lambda: li.maxsim(ours(2, 3, 8), ours(4, 5, 6)),
    "Q must be bfloat16": lambda: li.maxsim(ours(2, 3, 8).char(), ours(4, 5, 8).char()),
    "Q must be a torch.Tensor": lambda: li.maxsim(ours(2, 3, 8).numpy(), ours(4, 5, 8)),
    "d_mask must be a dense bool": lambda: scored(ours(2, 3, 8), d_mask=torch.ones(4, 5)),
    "d_mask must be ..., the shape": lambda: scored(ours(2, 3, 8), d_mask=torch.ones(5, 4).bool()),
    "D [Nq, K, Ld, d]": lambda: li.maxsim(ours(2, 3, 8), ours(3, 2, 5, 8)),
    "maxsim_pairs needs": lambda: li.maxsim_pairs(ours(2, 3, 8), ours(4, 5, 8)),
    "cu_seqlens_d must not decrease": lambda: packed([0, 5, 10, 15, 21]),
    "maxsim(normalize=False)": without_norms,
    "double backward": differentiated_twice,
    "maxsim has no forward-mode": lambda: torch.func.jvp(scored, (ours(2, 3, 8),), (ours(2, 3, 8),)),
    "late_interaction::maxsim does not": lambda: torch.vmap(scored)(ours(2, 3, 8)),
    "rerank_direct has no gradients": lambda: rerank_direct(
        ours(3, 8, grad=True), ours(9, 8), torch.tensor([0]), torch.tensor([3])
    ),
    "... holds a zero-length": an_empty_compressed_document,
    "temperature must be": lambda: li.losses.contrastive(ours(2, 3, 8), ours(2, 5, 8), temperature=0),
    "Q must be [B, Lq, d]": lambda: li.losses.distill_kl_div(ours(2, 3, 8), ours(4, 5, 8), torch.zeros(2, 4)),
    "losses.contrastive: the exchange": a_lost_rank,
    "... holds a corpus": not_finished,
    "... must have ... bytes": cut_short,
    "... is being written": two_writers,
    "generation ... of": compacted,
    "... does not have the checksum": changed,
    "... No space left": a_full_disk,
    "late_interaction has no compiled": in_another_process("._C", ""),
    "late_interaction has no CUDA": in_another_process(
        "._cuda", "x = torch.ones(1, 1, 1, device='cuda'); late_interaction.maxsim(x, x)"
    ),
    'patch("pylate") needs': without_pylate,
    "progress=True needs tqdm": without_tqdm,
}  # fmt: skip
MESSAGES = [m for m in re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE) if m not in NOT_OURS]


def test_every_message_of_the_page_has_a_case():
    assert len(MESSAGES) == len(CASES) >= 20


@pytest.mark.parametrize("start", CASES)
@pytest.mark.filterwarnings("error:maxsim:UserWarning")
def test_the_package_says_so(start, monkeypatch, tmp_path):
    (message,) = [m for m in MESSAGES if m.startswith(start)]
    if "no CUDA" in start and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    case = CASES[start]
    wanted = ".*".join(map(re.escape, message.split("...")))
    given = {"monkeypatch": monkeypatch, "tmp_path": tmp_path}
    with pytest.raises((TypeError, ValueError, RuntimeError, ImportError, OSError, UserWarning)) as raised:
        case(*(given[name] for name in case.__code__.co_varnames[: case.__code__.co_argcount]))
    assert re.match(wanted, str(raised.value), re.DOTALL), str(raised.value)
