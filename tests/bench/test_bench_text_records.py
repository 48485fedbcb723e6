"""Commands of the bench that print tables and append them to a text file, in tiny shapes."""

import sys

import pytest

from bench.command_line import main
from bench.harness import results
from tests.support.programs import printed


def positive(printed_number):
    return float(printed_number.replace(",", "")) > 0  # 2,937 on a busy host


def test_first_passes_are_timed_and_their_recall_is_told(capsys, tmp_path):
    sizes = ["--documents", "40", "--Ld", "8", "--Lq", "5", "--d", "16", "--candidates", "10", "40"]
    kept = tmp_path / "first-pass.txt"
    given = ["first-pass", "--device", "cpu", *sizes]
    assert main([*given, "--out", str(kept)]) == 0
    told = capsys.readouterr().out.rstrip("\n")
    rows = [line.split() for line in told.splitlines()]
    assert [row[0] for row in rows[3:]] == ["bfloat16", "fp8", "int8", "hamming", "1bit", "4bit"]
    assert all(positive(row[1]) and float(row[-1]) == 1 and 0 < float(row[-2]) <= 1 for row in rows[3:])
    assert all(positive(row[5]) for row in rows[3:]) and float(rows[4][4]) == 1  # fp8 over fp8
    head, _, table = kept.read_text().rstrip("\n").partition("\n\n")
    assert table == told and head.endswith(f" -m bench {' '.join(given)}`") and "commit" in head


def test_what_encodings_of_muvera_find_is_told_and_kept(capsys, tmp_path):
    kept = tmp_path / "muvera.txt"
    sizes = (
        f"--documents 60 --Ld 4 --Lq 5 --d 16 --queries 2 --candidates 60 --speed-documents 2 --out {kept}"
    )
    assert main(["muvera", "--configurations", "0", "4", *sizes.split()]) == 0
    told = capsys.readouterr().out.rstrip("\n")
    assert kept.read_text().rstrip("\n").partition("\n\n")[2] == told
    lines = told.splitlines()
    found = [line.split("  ") for line in lines if line.startswith("k_sim") and "1.0000" in line]
    assert len(found) == 2 and all(int(row[-1]) <= 60 for row in found)
    assert sum("a copy of memory" in line for line in lines) == 1


def test_pooling_is_timed(capsys):
    assert main(["pooling", "--device", "cpu", "--documents", "3", "--Ld", "20", "--d", "8"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0][:4] == ["documents", "[3,", "20,", "8],"]
    assert [row[0].rstrip(",") for row in rows[3:]] == ["ward", "kmeans", "ward", "kmeans", "ward"]
    assert all(positive(row[-3]) for row in rows[3:7])


def test_searches_of_passages_are_timed(capsys):
    sizes = ["--documents", "50", "--tokens", "600", "--centroids", "16", "--Lq", "4"]
    assert main(["passages", "--device", "cpu", *sizes]) == 0
    title, _, _, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("50 passages, 6") and "16 centroids" in title
    assert [row.split(",")[0].split()[0] for row in rows] == ["exact", "centroids", "centroids", "centroids"]
    assert all(0 < float(row.split()[-3]) <= float(row.split()[-2]) for row in rows)


def by_processes(world, kept, words):
    """The lines that `python -m bench` keeps, by torchrun where there is more than one process, with gloo."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world] if world > 1 else []
    command = (*start, "-m", "bench", *words.split(), "--device", "cpu", "--rounds", "1", "--out", kept)
    variables = {"OMP_NUM_THREADS": 1}
    printed(sys.executable, *command, cwd=results.ROOT, variables=variables, timeout=240)
    lines = kept.read_text().rstrip().splitlines()
    started = f"torchrun --nproc-per-node {world}"
    assert f"{started} -m bench {words} " in lines[0]
    return lines


@pytest.mark.parametrize("world", [1, 2])
def test_a_search_by_shards_is_timed_and_compared(world, tmp_path):
    """Results of all processes are those of one alone, to the bit."""
    sizes = "--documents 301 --host-documents 100 --queries 2 --Lq 5 --Ld 8 --dims 16"
    lines = by_processes(world, tmp_path / "shards.txt", f"shards {sizes}")
    assert f"the best 100, {world} processes" in lines[2]
    rows = [line for line in lines if " on the GPUs" in line or " in pinned memory" in line]
    assert len(rows) == 3 and all(" same" in row for row in rows)
    assert "200 documents a process" in lines[-1]


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_by_shares_is_timed_and_compared(world, tmp_path):
    """Its loss and gradients are those of one process alone to rounding, and so are the gathered ones."""
    sizes = "--batches 12,7 --tails 0,0.001 --Lq 3 --Ld 5 --dims 16"
    lines = by_processes(world, tmp_path / "weak.txt", f"weak-scaling {sizes}")
    rows = [line.split() for line in lines[-4:]]
    batch = str(7 // world * world)
    assert [row[:2] for row in rows] == [["12", "0"], ["12", "0.001"], [batch, "0"], [batch, "0.001"]]
    assert all(positive(x) for row in rows for x in (row[2], row[3], row[5]))
    exact, skipping = rows[::2], rows[1::2]
    assert all(float(row[-1]) < 1e-5 and float(row[-3]) < 1e-5 and positive(row[-5]) for row in exact)
    assert all(float(row[-1]) < 1e-3 and row[-3:-1] == ["-", "-"] for row in skipping)


@pytest.mark.parametrize("world", [1, 2])
def test_steps_of_single_vectors_are_timed_and_compared(world, tmp_path):
    """Losses and gradients are those of float64 to rounding."""
    words = "single-vectors --batches 150,301 --dims 16 --sustain 0.01"
    rows = [line.split() for line in by_processes(world, tmp_path / "single.txt", words)[-2:]]
    assert [row[:2] for row in rows] == [["150", str(world)], [str(301 // world * world), str(world)]]
    assert all(positive(row[2]) and positive(row[4]) for row in rows)
    assert all(float(x) < 1e-4 for row in rows for x in (row[-5], row[-3], row[-1]))
