"""`python -m bench engines` on tokens of its own: what it rates, and what it says of missing engines."""

import torch
from torch.nn.functional import normalize

from bench.harness.run_header import package_version
from bench.tuning import engines


def tokens(*lengths):
    return [normalize(torch.randn(n, engines.DIM), dim=-1).half() for n in lengths]


def test_exact_searches_find_all_and_others_are_rated_against_them(monkeypatch, tmp_path):
    D = tokens(*[3, 9, 20, 7, 5] * 8)
    D += engines.planted(D, 10, "cpu")
    Q = [normalize(x[:4] + 0.1 * torch.randn(x[:4].shape), dim=-1) for x in D[:6]]
    exact = engines.corpus_of(D, str(tmp_path / "exact"), "cpu", dtype=torch.float16).search(Q, 30)
    monkeypatch.setattr(engines, "ENGINES", engines.ENGINES | {
        "broken": engines.Engine("torch", lambda *_: 1 / 0),
        "small": engines.Engine("torch", lambda *_: 1 / 0, most=49),
        "missing": engines.Engine("no-such-engine", lambda *_: 1 / 0),
        "worst": engines.Engine("torch", lambda D, *_: {"any": lambda Q: [[0] * engines.TOP for _ in Q]}),
    })  # fmt: skip
    rows = {name: list(engines.rows_of(name, Q, D, exact, "cpu")) for name in engines.ENGINES}
    for name in ("ours, float16", "ours, int8"):
        _, setting, *figures, recall = rows[name][0]
        assert setting == "exact" and float(recall) > 0.9 and len(figures) == 4
    assert rows["broken"] == [["broken", "ZeroDivisionError: division by zero"]]
    assert rows["small"] == [["small", "left out beyond 49 documents"]]
    assert rows["missing"] == [["missing", "not installed"]]
    assert float(rows["worst"][0][-1]) <= 0.1
    for name in ("fast-plaid", "xtr-warp"):
        assert package_version(engines.ENGINES[name].distribution) or rows[name][0][1] == "not installed"


def test_planted_documents_are_near_a_real_one():
    D = tokens(5, 9)
    for x in engines.planted(D, 6, "cpu"):
        (near,) = [y for y in D if len(y) == len(x)]
        assert 0.8 < float((x * near).float().sum(-1).mean()) < 0.99
