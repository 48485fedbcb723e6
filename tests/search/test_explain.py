"""explain, Alignment and plot_alignment, against the whole grid of similarities in float64."""

import re
import sys

import pytest
import torch

import late_interaction as li
from late_interaction.alignment import Alignment
from late_interaction.alignment.plot import plot_alignment


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def by_grid(q, D, q_mask=None, d_mask=None, normalize=False):
    """(matches, contributions, shares) of one query and one document, by all their similarities."""
    q, D = q.double().cpu(), D.double().cpu()
    if normalize:
        q, D = (torch.nn.functional.normalize(x, dim=-1) for x in (q, D))
    matches, contributions, shares = [], [], [0.0] * len(D)
    for s, row in enumerate(q @ D.T):
        valid = [t for t in range(len(D)) if d_mask is None or d_mask[t]]
        if not valid or (q_mask is not None and not q_mask[s]):
            matches.append(-1)
            contributions.append(0.0)
            continue
        best = max(valid, key=lambda t: (float(row[t]), -t))
        matches.append(best)
        contributions.append(float(row[best]))
        shares[best] += contributions[-1]
    return matches, contributions, shares


def assert_explains(alignment, expected):
    matches, contributions, shares = expected
    assert alignment.matches.tolist() == matches
    for got, wanted in ((alignment.contributions, contributions), (alignment.shares, shares)):
        torch.testing.assert_close(got.double(), torch.tensor(wanted).double(), rtol=1e-4, atol=1e-4)
    assert alignment.score == pytest.approx(sum(contributions), rel=1e-4, abs=1e-4)


def batch(device, dtype=torch.float32, Nq=3, Nd=4, Lq=5, Ld=9, d=16):
    generator = torch.Generator().manual_seed(0)
    Q = torch.randn(Nq, Lq, d, generator=generator).to(device, dtype)
    D = torch.randn(Nd, Ld, d, generator=generator).to(device, dtype)
    q_mask = (torch.rand(Nq, Lq, generator=generator) < 0.7).to(device)
    d_mask = (torch.rand(Nd, Ld, generator=generator) < 0.6).to(device)
    q_mask[0], d_mask[1] = False, False
    return Q, D, q_mask, d_mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_against_the_grid_and_maxsim(device, dtype, normalize):
    Q, D, q_mask, d_mask = batch(device, dtype)
    got = li.explain(Q, D, q_mask, d_mask, normalize=normalize, precision="highest")
    scores = li.maxsim(Q, D, q_mask, d_mask, normalize=normalize, precision="highest").cpu()
    for i, row in enumerate(got):
        for j, one in enumerate(row):
            assert_explains(one, by_grid(Q[i], D[j], q_mask[i], d_mask[j], normalize))
            assert one.score == pytest.approx(float(scores[i, j]), rel=1e-4, abs=1e-4)
            assert one.contributions.dtype == scores.dtype


def test_dims_of_the_result(device):
    Q, D, q_mask, d_mask = batch(device)
    assert_explains(li.explain(Q[1], D[0], q_mask[1], d_mask[0]), by_grid(Q[1], D[0], q_mask[1], d_mask[0]))
    for j, one in enumerate(li.explain(Q[1], D)):
        assert_explains(one, by_grid(Q[1], D[j]))
    for i, one in enumerate(li.explain(Q, D[2])):
        assert_explains(one, by_grid(Q[i], D[2]))
    for i, one in enumerate(li.explain(Q, D[:3], q_mask, d_mask[:3], paired=True)):
        assert_explains(one, by_grid(Q[i], D[i], q_mask[i], d_mask[i]))
    own = torch.stack([D, D.flip(0), D.roll(1, 0)])
    for i, row in enumerate(li.explain(Q, own)):
        for j, one in enumerate(row):
            assert_explains(one, by_grid(Q[i], own[i, j]))


def test_packed_and_empty_documents(device):
    Q, D, q_mask, _ = batch(device)
    tokens, bounds = D.flatten(0, 1), [0, 3, 3, 20, 36]
    cu = torch.tensor(bounds, device=device)
    got = li.explain(Q, tokens, q_mask, cu_seqlens_d=cu)
    for i, row in enumerate(got):
        for one, a, b in zip(row, bounds, bounds[1:], strict=False):
            assert_explains(one, by_grid(Q[i], tokens[a:b], q_mask[i]))
    chosen = torch.tensor([3, 1], device=device)
    for one, j in zip(li.explain(Q[1], tokens, cu_seqlens_d=cu, documents=chosen), (3, 1), strict=True):
        assert_explains(one, by_grid(Q[1], tokens[bounds[j] : bounds[j + 1]]))
    assert li.explain(Q[0], D[:, :0])[0].shares.shape == (0,)


def test_documents_of_retrieve(device):
    Q, D, q_mask, d_mask = batch(device)
    scores, documents = li.search(Q, D, 2, q_mask=q_mask, d_mask=d_mask, progress=False, normalize=True)
    got = li.explain(Q, D.cpu(), q_mask, d_mask.cpu(), documents=documents, normalize=True)
    for i, row in enumerate(got):
        for one, j, score in zip(row, documents[i].tolist(), scores[i].tolist(), strict=True):
            assert_explains(one, by_grid(Q[i], D[j], q_mask[i], d_mask[j], normalize=True))
            assert one.score == pytest.approx(score, rel=1e-4, abs=1e-4)


def test_ties_and_nan(device):
    Q = torch.eye(2, device=device)
    D = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 0.0]], device=device)
    assert li.explain(Q, D).matches.tolist() == [1, 0]  # the first of equals
    D[3, 0] = float("nan")
    one, score = li.explain(Q, D), li.maxsim(Q, D)
    assert torch.tensor(one.score).isnan() == score.isnan().cpu()
    assert one.contributions.isnan().any() == score.isnan().cpu()


def test_top_and_text():
    one = Alignment(torch.tensor([2, -1, 0]), torch.tensor([1.0, 0.0, 2.0]), torch.tensor([2.0, 0.0, 1.0]))
    assert one.top(1) == [(2, 0, 2.0)]
    assert one.top(9) == [(2, 0, 2.0), (0, 2, 1.0)]
    equal = Alignment(torch.arange(99), torch.ones(99), torch.full((99,), 1 / 99))
    assert equal.top(50) == [(i, i, 1.0) for i in range(50)]  # the first of equals comes first
    lines = one.text(["a", "b", "c"], ["x", "y", "z"]).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["a", "z", "1.0000"],
        ["b", "-", "0.0000"],
        ["c", "x", "2.0000"],
    ]
    assert lines[-1] == "score 3.0000"
    shades = re.findall(r"rgba\(255,165,0,([0-9.]+)\)", one.html())
    assert shades == ["0.30", "0.00", "0.60"]  # of the largest contribution


@pytest.mark.parametrize(
    "contributions, shades",
    [
        ([-1.0], ["0.00"]),
        ([0.0], ["0.00"]),
        ([0.25, 0.5], ["0.30", "0.60"]),
        ([-0.5, 1.0], ["0.00", "0.60"]),
        ([float("inf"), 1.0], ["0.00", "0.00"]),
        ([float("nan"), 1.0], ["0.00", "0.60"]),
    ],
)
def test_shades_are_parts_of_the_largest_contribution(contributions, shades):
    values = torch.tensor(contributions)
    one = Alignment(torch.zeros(len(values), dtype=torch.long), values, values.sum()[None])
    assert re.findall(r"rgba\(255,165,0,([0-9.naif-]+)\)", one.html()) == shades


def test_a_table_is_as_wide_as_its_tokens():
    one = Alignment(torch.tensor([1, 0]), torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]))
    lines = one.text(["q" * 20, "r"], ["d", "e" * 30]).splitlines()
    assert lines[0] == f"{'query token':<20}  {'document token':<30}  contribution"
    assert lines[1] == f"{'q' * 20}  {'e' * 30}        1.0000" and lines[2].startswith(
        f"r{' ' * 21}d{' ' * 31}"
    )


def test_html_escapes_tokens():
    one = li.explain(torch.eye(2), torch.eye(2))
    got = one.html(["<script>alert(1)</script>", "\"q\" & 's'"], ["<b>", "</td>"])
    assert "<script" not in got and "<b>" not in got and got.count("</td>") == 7
    assert "&lt;script&gt;" in got and "&quot;q&quot; &amp; &#x27;s&#x27;" in got
    assert one._repr_html_() == one.html()


def test_plots(tmp_path, pyplot):
    one = li.explain(torch.randn(6, 8), torch.randn(3 + 12, 8))
    ax = plot_alignment(one, image_grid=(2, 6), first_patch=3)
    drawn = torch.as_tensor(ax.images[0].get_array().tolist())
    torch.testing.assert_close(drawn, one.shares[3:].reshape(2, 6))
    names = [f"${i}_$" for i in range(15)]
    figure, own = pyplot.subplots()
    assert plot_alignment(one, names, ax=own) is own
    assert sum(bar.get_height() for bar in own.patches) == pytest.approx(one.score, abs=1e-4)
    figure.savefig(tmp_path / "a.png")
    whole = torch.as_tensor(plot_alignment(one, image_grid=[3, 5]).images[0].get_array().tolist())
    torch.testing.assert_close(whole, one.shares.reshape(3, 5))


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_bars_of_the_tokens_that_matched(tokens, pyplot):
    """The first one, too, and not the tokens that a mask drops; names stand upright where they are many."""
    q_mask = torch.ones(tokens + 2, dtype=torch.bool)
    q_mask[-2:] = False
    one = li.explain(torch.eye(12)[: tokens + 2], torch.eye(12), q_mask)
    ax = plot_alignment(one)
    assert [bar.get_height() for bar in ax.patches] == [1.0] * tokens
    assert [label.get_text() for label in ax.get_xticklabels()] == [str(i) for i in range(tokens)]
    assert {label.get_rotation() for label in ax.get_xticklabels()} == {90.0 if tokens > 8 else 0.0}


def test_a_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="plot_alignment needs matplotlib: pip install matplotlib"):
        plot_alignment(li.explain(torch.eye(2), torch.eye(2)))


CODECS = {
    **{nbits: lambda x, nbits=nbits: li.codecs.Residual.train(x, 7, nbits=nbits) for nbits in (1, 2, 4, 8)},
    "int8": lambda _: li.codecs.Int8(),
    "fp8": lambda _: li.codecs.Fp8(),
    "1 bit": lambda _: li.codecs.Bits(1),
    "4 bits": lambda _: li.codecs.Bits(4),
    "signs": lambda _: li.codecs.Bits(1, scales=False),
}


def coded(device, kind, dtype, d=20):
    """Queries, codes of documents, and the tokens that these stand for."""
    generator = torch.Generator().manual_seed(0)
    Q = torch.randn(3, 5, d, generator=generator).to(device, dtype)
    documents = [torch.randn(n, d, generator=generator).to(device, dtype) for n in (9, 0, 4, 1)]
    codes = CODECS[kind](torch.cat(documents)).encode(documents)
    exact = dtype if isinstance(kind, int) else torch.float32
    return Q, codes, [x.to(exact).double() for x in codes.codec.decode(codes)]


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_documents_that_are_codes(device, kind, dtype, normalize):
    Q, codes, tokens = coded(device, kind, dtype)
    own = Q
    if not isinstance(kind, int):
        if normalize:
            with pytest.raises(ValueError, match="normalize must be False for"):
                li.explain(Q, codes, normalize=True)
            return
        codec = li.codecs.Int8() if "bit" in kind else codes.codec
        own = codec.decode(codec.encode(Q)).values
    expected = [[by_grid(q, x, normalize=normalize) for x in tokens] for q in own]
    scores = li.maxsim(Q, codes, normalize=normalize)
    limit = 0.1 if dtype == torch.bfloat16 else 2e-3  # GPUs round a codebook to bf16 before they add
    for form in (codes, codes.to_padded()):
        got = li.explain(Q, form, normalize=normalize)
        for i in range(3):
            for j in range(4):
                assert_explains(got[i][j], expected[i][j])
                assert got[i][j].score == pytest.approx(float(scores[i, j]), rel=2e-3, abs=limit)
    chosen = torch.tensor([[2, 0], [3, 3], [1, 2]], device=device)
    found = li.explain(Q, codes, documents=chosen.int(), normalize=normalize)
    for i, row in enumerate(chosen.tolist()):
        for one, j in zip(found[i], row, strict=True):
            assert_explains(one, expected[i][j])
    for one, j in zip(li.explain(Q[1], codes, documents=chosen[0], normalize=normalize), (2, 0), strict=True):
        assert_explains(one, expected[1][j])
