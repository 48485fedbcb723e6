"""Tests that run in environments of their own, and what is said where a package is not installed."""

import sys

import pytest
import torch

import late_interaction as li
from late_interaction import Corpus
from late_interaction.integrations import lancedb
from tests.lancedb_environment import fast_plaid_missing, here, run_there
from tests.selection import NIGHTLY

TOKENS = torch.ones(2, 4)
LIVING = ["TestHistory", "test_filters"]
OF_RAY = [""] if NIGHTLY else ["::test_a_worker_that_is_killed[2]", "::test_wrong_arguments"]
FAISS = "tests/search/test_muvera.py::test_the_guides_example_with_faiss_finds_what_an_exact_search_finds"
# By the environment: whether its packages are here, and tests that want them.
ELSEWHERE = {
    "lancedb": (
        here("lancedb", "pyarrow"),
        ["tests/search/test_lancedb.py", "tests/search/test_corpus_arrow.py", FAISS]
        + [f"tests/search/test_corpus_living.py::{name}" for name in LIVING],
    ),
    "ray": (here("ray", "pyarrow"), [f"tests/search/test_ray.py{name}" for name in OF_RAY]),
    "fast-plaid": (fast_plaid_missing() is None, ["tests/search/test_fast_plaid.py"]),
}


@pytest.mark.parametrize("environment", ELSEWHERE)
def test_tests_of_an_environment_pass_there(environment):
    is_here, tests = ELSEWHERE[environment]
    if is_here:
        pytest.skip("they run in this environment")
    run_there(*tests, environment=environment)


@pytest.mark.parametrize(
    ("package", "needed", "extra", "call"),
    [
        ("pyarrow", "Arrow arrays need pyarrow", "arrow", lambda: Corpus.from_arrow([[[1.0]]])),
        ("lancedb", "maxsim_reranker needs lancedb", "lancedb", lambda: lancedb.maxsim_reranker(TOKENS)),
        ("lancedb", "open_corpus needs lancedb", "lancedb", lambda: lancedb.open_corpus(None)),
        ("ray", "needs Ray Data", "ray", lambda: li.ray.Documents(None)),
    ],
)
def test_what_is_said_without_a_package(package, needed, extra, call, monkeypatch):
    if package != "pyarrow" and here(package):
        pytest.skip(f"{package} is installed, and was imported with what needs it")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{needed}: pip install 'late-interaction\[{extra}\]'"):
        call()
