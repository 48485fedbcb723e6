"""tools/maxsim_sentinel.py: which functions of a package compute a MaxSim, by their source."""

import re
import textwrap
import zipfile
from pathlib import Path

import pytest

from tools import maxsim_sentinel as sentinel
from tools.maxsim_leaves import LEAVES, PATCHED

MAXSIM = {
    "einsum": "return torch.einsum('ash,bth->abst', q, d).max(axis=-1).values.sum(axis=-1)",
    "other letters": "return torch.einsum('bnd,csd->bcns', q, d).max(dim=3)[0].sum(dim=2)",
    "matmul": "return torch.matmul(q.float(), d.float().T).amax(dim=-1).sum()",
    "an operator, with numpy": "return float((q @ d.T).max(axis=-1).sum())",
    "a mean": "return np.mean(np.max(np.inner(q, d), axis=-1))",
    "topk": "return torch.sum(torch.topk(torch.bmm(q, d.mT), 1).values, -1)",
    "helper variables": """
        scores = torch.bmm(q, d.transpose(1, 2))
        scores.masked_fill_(~mask, float('-inf'))
        best = scores.amax(dim=-1)
        best = torch.where(mask, best, 0)
        return best.sum(-1)""",
    "an attribute": """
        self.grid = q @ d.T
        best, _ = self.grid.max(-1)
        return best.sum(-1) / len(q)""",
    "a list of parts": """
        parts = []
        for x in d:
            parts.append(torch.einsum('sh,th->st', q, x))
        return torch.cat(parts).max(-1).values.sum()""",
    "a sum by a loop": """
        score = 0
        for token in q:
            score += (token @ d.T).max()
        return score""",
    "parts of a result": """
        for i, x in enumerate(d):
            out[i] = (q @ x.T).max(-1).values
        return out.sum(-1)""",
    "a comprehension": "return sum((token @ d.T).max() for token in q)",
    "another function's product": "return similarities(q, d).amax(-1).sum(-1)",
    "another function's maximum": "return aggregate(torch.einsum('bnd,csd->bcns', q, d), 3, dim_sum=2)",
    "a smooth maximum": "return (tau * torch.logsumexp(q @ d.T / tau, dim=-1)).sum(-1)",
    "Triton": """
        m = tl.full([BLOCK], float('-inf'), dtype=tl.float32)
        for block in range(0, length, BLOCK):
            S = tl.where(valid, tl.dot(q, tl.trans(d)), float('-inf'))
            m = tl.maximum(m, tl.max(S, axis=1))
        tl.store(out, tl.sum(tl.where(q_valid, m, 0.0)))""",
}
OTHERS = {
    "a softmax": """
        scores = q @ d.T
        weights = (scores - scores.max(-1).values).exp()
        return weights / weights.sum(-1)""",
    "an attention in Triton": """
        qk = tl.dot(q, k)
        m = tl.maximum(m, tl.max(qk, 1))
        qk -= m[:, None]
        return tl.sum(tl.exp(qk), 1)""",
    "a mean of similarities": "return (q @ d.T).mean()",
    "the best document": "return (q @ d.T).max(-1).indices.sum()",
    "lengths": """
        scores = torch.bmm(q, d)
        longest = max(len(x) for x in scores)
        return sum(longest for _ in q)""",
    "a maximum of what is no product": "return (q + d).max(-1).values.sum(-1)",
}
HELPERS = """
def similarities(q, d):
    return torch.einsum('ash,bth->abst', q, d)


class Loss:
    def aggregate(self, raw, dim_max, dim_sum):
        return raw.amax(dim=dim_max).sum(dim=dim_sum)
"""


def release_of(folder, bodies):
    """A package whose module has a function `scored_i` for each body."""
    functions = [
        f"def scored_{i}(self, q, d):\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ")
        for i, body in enumerate(bodies)
    ]
    module = folder / "some-library==1.0" / "some_library" / "scores.py"
    module.parent.mkdir(parents=True)
    module.write_text("\n\n".join([*functions, HELPERS]))
    return folder / "some-library==1.0"


@pytest.mark.parametrize("what", [*MAXSIM, *OTHERS])
def test_what_computes_a_maxsim(tmp_path, what):
    release = release_of(tmp_path, [(MAXSIM | OTHERS)[what]])
    found = {"scores.scored_0": "some_library/scores.py:1"} if what in MAXSIM else {}
    assert dict(sentinel.leaves(release)) == found


def test_methods_and_functions_within_functions_have_their_paths(tmp_path):
    release = release_of(tmp_path, [])
    inner = "class Scorer:\n    async def score(self, q, d):\n        def core():\n            return 0\n"
    inner += "        return (q @ d.T).max(-1).values.sum()\n"
    (release / "some_library" / "inner.py").write_text(inner)
    nested = inner.replace("return 0", "return (q @ d.T).max(-1).values.sum()")
    (release / "some_library" / "nested.py").write_text(nested)
    assert dict(sentinel.leaves(release)) == {
        "inner.Scorer.score": "some_library/inner.py:2",
        "nested.Scorer.score": "some_library/nested.py:2",
        "nested.Scorer.score.core": "some_library/nested.py:3",
    }


@pytest.fixture
def night(tmp_path, monkeypatch, capsys):
    """A run of the program on two functions of a wheel, given what the table says of its package."""
    release = release_of(tmp_path / "built", [MAXSIM["matmul"], MAXSIM["einsum"]])
    wheel = tmp_path / "some_library-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in release.rglob("*.py"):
            archive.write(path, path.relative_to(release))
        archive.writestr("some_library-1.0.dist-info/METADATA", "Name: some-library\nVersion: 1.0\n")
        archive.writestr("some_library/large.so", "")

    def pip(command, check):
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "some-library" and check
        (folder,) = (part.removeprefix("--dest=") for part in command if part.startswith("--dest="))
        (Path(folder) / wheel.name).write_bytes(wheel.read_bytes())

    monkeypatch.setattr(sentinel.subprocess, "run", pip)

    def run(table):
        monkeypatch.setattr(sentinel, "LEAVES", {"some-library": table})
        return sentinel.main(str(tmp_path / "compat")), capsys.readouterr()

    return run


KNOWN = {"scores.scored_0": PATCHED, "scores.scored_1": "for a reason"}


def test_a_table_that_says_what_is_there(night, tmp_path):
    failed, said = night(KNOWN)
    assert not failed and not said.err.strip()
    assert "some_library/scores.py:1: scores.scored_0\n    patched" in said.out
    assert "scores.scored_1\n    for a reason" in said.out
    release = tmp_path / "compat" / "some-library==1.0"
    kept = sorted(path.name for path in release.rglob("*") if path.is_file())
    assert kept == ["METADATA", "scores.py"]


def test_what_the_table_does_not_know_and_what_is_gone_is_named(night):
    failed, said = night({"scores.scored_0": PATCHED})
    assert failed
    assert said.err == "some-library==1.0 some_library/scores.py:4: scores.scored_1 is reached by no patch\n"
    failed, said = night(KNOWN | {"scores.of_before": PATCHED})
    assert failed and "scores.of_before is in maxsim_leaves.py, and there no more" in said.err


def test_the_table_has_every_library_that_is_patched():
    from late_interaction.integrations.patches import _NAMES

    assert LEAVES.keys() == set(_NAMES)
    assert all(reason for table in LEAVES.values() for reason in table.values())


def names_in(cell):
    """The parts of the names that a table's cell sets in code."""
    return {part for name in re.findall(r"`([\w.]+)`", cell) for part in name.split(".")}


@pytest.mark.parametrize("package", LEAVES)
def test_the_guide_names_what_is_patched_and_what_is_not(package):
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "libraries.md").read_text()
    row = re.search(rf"^\| {package.replace('-', '.')} [\d.]+ \|(.*)\|(.*)\|$", guide, re.I | re.M)
    patched, left = map(names_in, row.groups())
    for name, reason in LEAVES[package].items():
        if reason.startswith(PATCHED):
            *modules, last = (reason.removeprefix(PATCHED) or name).split(".")
            holders = {part for part in modules if part[0].isupper()}
            assert {last, *holders} <= patched, name
        elif not reason.startswith("no "):  # no MaxSim, no module
            assert name.split(".")[-1] in left, name
