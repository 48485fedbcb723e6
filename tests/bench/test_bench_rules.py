"""What a record must keep to: the rules, merging by whole groups, and the fingerprint of the kernels."""

import pytest
import torch

from bench.command_line import main
from bench.harness import named_shapes, results, run_header
from bench.harness.library import EINSUM, FLASH, LIK, OURS
from bench.rules import broken_rules as broken
from bench.tuning import kernel_fingerprint
from late_interaction._doctor.ceilings import Ceilings

CPU = torch.device("cpu")
FORWARD, STEP, PACKED = named_shapes.FORWARD[0], named_shapes.TRAINING[0], named_shapes.VARLEN[0]


def header(run="one", command="python -m bench run --suite forward"):
    made = run_header.new_header(CPU, Ceilings(700.0, 350.0, 4.0, 3.9), run=run, gpu="Some GPU", driver="1")
    return {**made, "command": command}


def row(impl, us, run="one", shape=FORWARD, suite="forward", op="fwd", **more):
    out = results.new_row(suite, shape, op, torch.bfloat16, impl)
    return {**out, "gpu_us": us, "wall_us": us + 10, "gpu_method": "graph", "run": run, **more}


def whole():
    return [header(), row(OURS, 20.0), row(LIK, 30.0), row(EINSUM, 25.0)]


def test_a_record_of_one_run_by_one_clock_is_in_order():
    assert broken(whole()) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"variant": "sideways"}, "no variant 'sideways'"),
        ({"shape": "no-such"}, "does not measure this shape"),
        ({"Ld": 301}, "does not measure this shape"),
        ({"suite": "plaid"}, "does not measure this suite"),
        ({"impl": "fast-plaid"}, "does not measure fast-plaid"),
        ({"run": "three"}, "no header of run three"),
    ],
)
def test_what_no_command_gives_breaks_the_rules(changed, said):
    rows = [header(), {**row(OURS, 20.0), **changed}]
    assert said in broken(rows)[0]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python -m bench run --suite nosuch", "nosuch"),
        ("python -m bench run --onwards", "--onwards"),
        ("python -m bench sweep --again", "--again"),
        ("python -m bench run --merge --impl ours", "whole groups"),
        ("python -m bench run --suite forward --shapes colpali", "does not measure this shape"),
        ("python -m bench run --suite forward --impl lik", f"does not measure {OURS}"),
        ("python -m bench report", "records nothing"),
        ("vi record.json", "records nothing"),
    ],
)
def test_a_command_that_cannot_be_run_again_breaks_the_rules(command, said):
    assert any(said in line for line in broken([header(command=command), row(OURS, 20.0)]))


def test_a_step_whose_gradients_were_not_compared_breaks_the_rules():
    step = row(OURS, 90.0, shape=PACKED, suite="varlen", op="fwd+bwd", variant="forward + backward")
    own = header(command="python -m bench run --suite varlen")
    assert "gradients were not compared" in broken([own, step])[0]
    assert broken([own, {**step, "grad_err": 2e-3}]) == []


def test_a_recipe_whose_gradients_were_not_compared_breaks_the_rules():
    own = header(command="python -m bench end-to-end")
    step = {"work": "modernbert, step", "batch": 32, "run": "one", "variants": {"LIK": {"s": 1.0}}}
    assert broken([own, step]) == ["modernbert, step 32: LIK: timed, but its gradients were not compared"]
    step["variants"] = {"LIK": {"s": 1.0, "grad_err": 1e-3}}
    assert broken([own, step]) == []
    assert "is no command" in broken([header(command="python -m bench end-to-end --rows 3"), step])[0]


def test_a_check_of_a_folder_names_the_record(tmp_path, capsys):
    rows = [header(), header("two"), row(OURS, 20.0), row(LIK, 30.0, run="two")]
    results.write(tmp_path / "some-gpu.json", rows)
    pages = pytest.importorskip("bench.report.pages", reason="pandas is not installed")
    readme = tmp_path / "README.md"
    readme.write_text(f"{pages.BEGIN}\n{pages.END}\n")
    options = ["--readme", str(readme), "--results", str(tmp_path)]
    assert main(["report", *options]) == 0 and main(["check", *options]) == 1
    told = "some-gpu.json: forward text-short fwd: rows of 2 runs: one, two"
    assert capsys.readouterr().err.splitlines() == [told]


def test_records_are_well_formed():
    for path in sorted(results.DIRECTORY.glob("*.json")):
        headers, rows = results.split(results.read(path))
        assert headers and rows and {r["run"] for r in rows} == {h["run"] for h in headers}
        if not path.name.startswith(results.OTHER_RECORDS):
            assert all(set(results.KEYS) <= r.keys() for r in rows)


# ---- merging ----


def test_a_group_is_replaced_as_a_whole_and_the_others_are_kept():
    other = named_shapes.FORWARD[1]
    earlier = [*whole(), row(OURS, 40.0, shape=other)]
    later = [header("two"), *(row(impl, 10.0, run="two") for impl in (OURS, LIK, EINSUM, FLASH))]
    rows = results.replaced(earlier, later)
    headers, measured = results.split(rows)
    assert [h["run"] for h in headers] == ["one", "two"]
    assert [(r["shape"], r["impl"], r["run"]) for r in measured] == [
        (other.name, OURS, "one"), *((FORWARD.name, impl, "two") for impl in (OURS, LIK, EINSUM, FLASH)),
    ]  # fmt: skip
    assert broken(rows) == []


def test_one_implementation_is_not_put_beside_those_of_another_run(tmp_path):
    with pytest.raises(results.IncompleteError, match=rf"{LIK}.*another run"):
        results.replaced(whole(), [header("two"), row(OURS, 10.0, run="two"), row(EINSUM, 9.0, run="two")])
    path = tmp_path / "some-gpu.json"
    results.write(path, whole())
    before = path.read_text()
    with pytest.raises(results.IncompleteError):
        results.Results(path, header("two"), merge=True).add([row(OURS, 10.0)])
    assert path.read_text() == before


def test_parts_become_records_by_a_command(tmp_path, capsys):
    one, two, out = tmp_path / "one.json", tmp_path / "two.json", tmp_path / "records"
    results.write(one, whole())
    of_step = {"op": "fwd+bwd", "winners": "uniform", "grad_err": 2e-3}
    step = row(OURS, 90.0, run="b", shape=STEP, suite="training", **of_step)
    results.write(two, [header("b", "python -m bench run --suite training"), step])
    assert main(["merge", str(one), str(two), "--out", str(out)]) == 0
    rows = results.split(results.read(out / "some-gpu.json"))[1]
    assert {r["suite"] for r in rows} == {"forward", "training"}
    mixed = whole()
    mixed[2]["gpu_method"] = "events"
    results.write(one, mixed)
    before = (out / "some-gpu.json").read_text()
    assert main(["merge", str(one), "--out", str(out)]) == 1
    assert "timed by graphs and by events" in capsys.readouterr().err
    assert (out / "some-gpu.json").read_text() == before


# ---- the kernels that a time belongs to ----


def test_times_without_a_fingerprint_are_older(monkeypatch, tmp_path):
    assert kernel_fingerprint.are_older({"run": "one"})
    assert not kernel_fingerprint.are_older({"run": "one", "kernels": kernel_fingerprint.fingerprint()})
    folder = tmp_path / kernel_fingerprint.FOLDER
    folder.mkdir(parents=True)
    source, header, host = folder / "k.cu", tmp_path / "csrc" / "shared.cuh", folder / "run.cpp"
    source.write_text('#include "../../shared.cuh"\nint a = 1; // one')
    header.write_text("int b = 1;")
    monkeypatch.setattr(kernel_fingerprint, "ROOT", tmp_path)
    assert kernel_fingerprint.sources() == {source.resolve(), header.resolve()}
    first = {"kernels": kernel_fingerprint.fingerprint()}
    source.write_text('#include "../../shared.cuh"\nint a = 1;  // the first')
    host.write_text("int c = 1;")
    assert not kernel_fingerprint.are_older(first)
    header.write_text("int b = 2;")
    assert kernel_fingerprint.are_older(first)
    header.write_text("int b = 1;")
    assert not kernel_fingerprint.are_older(first)
    source.write_text("int a = 2;")
    assert kernel_fingerprint.are_older(first)
