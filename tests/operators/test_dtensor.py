"""DTensors through the operators on padded tokens: what is sharded stays so, and numbers are those of one
process. Placements are letters: a dim, R for a replica and P for a partial sum."""

import math

import pytest

from tests.support.groups import needs_gloo, on_ranks, succeeded

pytestmark = needs_gloo
WORKER = "tests.support.dtensor_worker"
# Of Q and D -> of the scores and both gradients.
QUERIES = ("0", "R"), ["0", "0", "P"]
DOCUMENTS = ("R", "0"), ["1", "P", "0"]
NOTHING = ("R", "R"), ["R", "R", "R"]
TOGETHER = ("0", "0"), ["0", "0", "0"]


def check(cases, sizes=(2,)):
    """cases: (name, (placements of Q, of D), those of the results, or None for any)."""
    calls = [(name, *sharded) for name, sharded, _ in cases]
    ranks = on_ranks(math.prod(sizes), f"{WORKER}.on_mesh", cases=calls, sizes=sizes)
    for found in succeeded(ranks):
        for (name, sharded, placed), (got, off) in zip(cases, found, strict=True):
            assert placed is None or got == placed, (name, sharded)
            assert max(off) < 1e-11, (name, sharded, off)


def test_one_side_is_sharded():
    names = "maxsim", "options", "recompute", "winners", "weighted", "masked", "smooth_maxsim"
    check([(name, *way) for name in names for way in (QUERIES, DOCUMENTS, NOTHING)])


def test_pairs_are_sharded_together():
    """In-batch calls of the same sizes between them: PyTorch keeps what it found out of a call."""
    names = "maxsim_pairs", "smooth_maxsim_pairs", "own documents"
    ways = TOGETHER, (("0", "R"), TOGETHER[1]), (("R", "0"), TOGETHER[1]), NOTHING
    cases = [(name, *way) for way in ways for name in names]
    cases[1:1] = cases[5:5] = [("maxsim, as many", *QUERIES), ("maxsim, as many", *DOCUMENTS)]
    check([*cases, ("own documents", ("R", "1"), ["1", "P", "1"])])


def test_both_sides_or_other_dims_are_sharded():
    """One side is gathered, or both; the choice is PyTorch's."""
    names = "maxsim", "recompute", "weighted", "masked", "smooth_maxsim"
    ways = ("0", "0"), ("1", "R"), ("R", "1"), ("1", "1"), ("2", "2"), ("0", "2")
    check([(name, way, None) for name in names for way in ways])


def test_xtr_selects_among_all_documents():
    check([("xtr_scores", *QUERIES), ("xtr_scores", ("R", "0"), None), ("xtr_scores", ("0", "0"), None)])


def test_queries_and_documents_over_two_dims_of_a_mesh():
    cases = [("maxsim", ("0R", "R0"), ["01", "0P", "P0"]), ("maxsim_pairs", ("0R", "0R"), ["0R"] * 3)]
    check([*cases, ("smooth_maxsim", ("R0", "0R"), ["10", "P0", "0P"])], sizes=(2, 2))


def test_a_parameter_of_both_sides_gets_the_whole_gradient():
    assert max(succeeded(on_ranks(2, f"{WORKER}.gradient_of_a_parameter"))) < 1e-11


@pytest.mark.parametrize("name", ["contrastive", "sigmoid"])
def test_losses_take_shards_and_a_group(name):
    """A DTensor itself would be one more set of shards to them."""
    for off, messages in succeeded(on_ranks(2, f"{WORKER}.losses", of=name)):
        assert max(off) < 1e-12
        for message in messages:
            assert message.startswith(
                f"TypeError: losses.{name} takes the tokens of each process, got a DTensor as Q"
            )
            assert "Q.to_local(), with group=Q.device_mesh.get_group()" in message
