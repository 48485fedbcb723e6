"""`python -m bench`: its commands, that every page names ones which exist, and the packages behind them."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import command_line
from bench.harness import recorder, results
from bench.harness.run_header import todays_command

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
PACKAGES = ("harness", "peers", "tuning", "suites", "report")  # each may import those before it
INTERNAL = {"bench.suites.first_call"}  # a process that the suite of first calls starts

PATTERNS = (
    "*.md", "Makefile", "docs/*.md", "bench/**/*.md", "bench/**/*.py", "bench/**/*.cu", "tools/*.py",
    ".github/workflows/*.yml", "requirements/*.txt", "csrc/**/*.*", "tests/**/*.py",
)  # fmt: skip
TEXTS = sorted(
    path
    for pattern in PATTERNS
    for path in ROOT.glob(pattern)
    if path.name != "test_bench_rules.py"  # which holds commands that break the rules
    and path != Path(__file__)
    and re.search(r"-m bench|bench/", path.read_text())
)


def parses(words: list[str]) -> bool:
    try:
        command_line.parser().parse_args(words)
    except SystemExit as stop:
        return stop.code in (0, None)  # --help
    return True


def named_commands(text: str) -> list[str]:
    """What follows `python -m bench`, or `torchrun ... -m bench`, in a text, up to the end of the command."""
    text = text.replace("\\\n", " ")
    return re.findall(r"(?:python|\$\(PY\)|torchrun [^`\n]*) -m (bench\b[^`#\n\"|>&]*)", text)


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_that_a_text_names_exists(path: Path) -> None:
    for command in named_commands(path.read_text()):
        program, *words = shlex.split(re.split(r" {2,}|[:;,.)]\s|[:;,.)]+$", command)[0])
        if program in INTERNAL or words[:1] == ["COMMAND"]:
            continue
        assert program == "bench", f"python -m {command}: there is one program, python -m bench"
        mentioned = len(words) < 2 and words[:1] in ([], *([name] for name in command_line.COMMANDS))
        assert mentioned or parses(words), f"python -m {command}: no such command"


def test_the_texts_name_every_command() -> None:
    """The search above finds commands at all."""
    found = {
        words[1] for path in TEXTS for c in named_commands(path.read_text()) if len(words := c.split()) > 1
    }
    assert found >= set(command_line.COMMANDS)


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_of_bench_that_a_text_names_exists(path: Path) -> None:
    for name in re.findall(r"(?<!tests/)\bbench/[\w/-]+\.(?:py|cu|md|txt|png)\b", path.read_text()):
        assert (ROOT / name).exists(), name


def test_the_command_of_every_recorded_run_can_be_run_again() -> None:
    count = 0
    for path in sorted(results.DIRECTORY.glob("*.json")):
        for header in results.split(results.read(path))[0]:
            program, *words = shlex.split(todays_command(header["command"]))[2:]
            assert program == "bench" and parses(words), header["command"]
            count += 1
    assert count > 8


@pytest.mark.parametrize(
    ("recorded", "today"),
    [
        ("python -m bench --suite forward --no-plot", "python -m bench run --suite forward"),
        ("python -m bench", "python -m bench run"),
        ("python -m bench.plans --seed 1", "python -m bench plans --seed 1"),
        ("python -m bench sweep --seed 1", "python -m bench sweep --seed 1"),
        ("vi record.json", "vi record.json"),
    ],
)
def test_a_recorded_command_is_told_as_today_s_program_takes_it(recorded: str, today: str) -> None:
    assert todays_command(recorded) == today


@pytest.mark.parametrize("name", [None, *command_line.COMMANDS])
def test_help_says_what_a_command_does_and_needs(
    name: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command_line.main([name, "--help"] if name else ["--help"])
    assert stop.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for each in [name] if name else command_line.COMMANDS:
        command = command_line.COMMANDS[each]
        assert command.cost[1:] in said and (name or " ".join(command.about.split()) in said)


def test_the_recorder_needs_pytorch_alone(tmp_path: Path) -> None:
    """A machine that records has neither the development packages nor the peers."""
    absent = (
        "matplotlib", "pytest", "hypothesis", "pybind11", "tqdm", "pylate", "colpali_engine", "fast_plaid",
        "late_interaction_kernels", "flash_maxsim", "maxsim_cpu", "numkong",
    )  # fmt: skip
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r})); from bench.command_line import main; "
        f"sys.exit(main(['record', '--list', '--out', {str(tmp_path)!r}]))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for line in run.stdout.splitlines():
        assert parses(shlex.split(line.split(": ", 1)[1])[3:]), line
    assert "bench sweep" in run.stdout and "bench plans" in run.stdout and "--suite first-call" in run.stdout


def test_the_recorder_goes_on_with_a_sweep_that_ran_out_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that leaves shapes is not done, and the next call begins with those that it has."""

    def sweep(*, found: str | None, code: int) -> recorder.Recorder:
        def command(job: recorder.Job, out: Path, dry: bool, cores: int, left: float) -> list[str]:
            program = (
                "import pathlib, sys; file = pathlib.Path(sys.argv[1]);"
                f"before = file.read_text() if file.exists() else None; assert before == {found!r}, before;"
                f"file.write_text((before or '') + 'x'); sys.exit({code})"
            )
            return [sys.executable, "-c", program, str(out / f"{job.name}.json")]

        monkeypatch.setattr(recorder.Job, "command", command)
        made = recorder.Recorder(tmp_path, ["0"], end=time.perf_counter() + 1e4)
        made.run([job for job in recorder.JOBS if job.name == "sweep"])
        return made

    assert sweep(found=None, code=0).outcomes["sweep"][0] == "done"
    (tmp_path / "sweep.json").rename(tmp_path / f"sweep{recorder.UNFINISHED}")
    assert sweep(found="x", code=3).outcomes["sweep"][0] == "failed with 3"
    assert not (tmp_path / "sweep.json").exists()
    assert sweep(found="xx", code=0).outcomes["sweep"][0] == "done"
    assert not (tmp_path / f"sweep{recorder.UNFINISHED}").exists()


def test_the_recorder_takes_the_longest_job_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def command(job: recorder.Job, out: Path, dry: bool, cores: int, left: float) -> list[str]:
        started.append(job.name)
        return [sys.executable, "-c", "import time; time.sleep(0.7)"]

    monkeypatch.setattr(recorder.Job, "command", command)
    jobs = [recorder.Job(name, 1, seconds, (), least) for name, seconds, least in [
        ("short", 20, 0), ("too long", 200, 0), ("long", 90, 0), ("flexible", 500, 50), ("medium", 30, 0)
    ]]  # fmt: skip
    made = recorder.Recorder(tmp_path, ["0", "1"], end=time.perf_counter() + 100)
    made.run(jobs)
    assert started == ["flexible", "long", "medium", "short"]
    assert made.outcomes["too long"][0] == "not started: no time left"


def test_the_sweep_is_given_the_time_that_is_left() -> None:
    sweep = next(job for job in recorder.JOBS if job.name == "sweep")
    for left, seconds in ((1e9, sweep.seconds), (200.0, 200.0)):
        words = sweep.command(Path(), False, 4, left)
        assert float(words[words.index("--seconds") + 1]) == seconds - recorder.MARGIN_S
    assert sweep.fits(200.0) and not sweep.fits(100.0)
    assert not next(job for job in recorder.JOBS if job.name == "training").fits(200.0)


# ---- the packages ----


def test_no_package_imports_one_above_it() -> None:
    for path in BENCH.glob("*/**/*.py"):
        level = PACKAGES.index(path.relative_to(BENCH).parts[0])
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports by full names"
                module = node.module or ""
                names = [f"bench.{a.name}" for a in node.names] if module == "bench" else [module]
            for name in names:
                if name.split(".")[0] == "bench":
                    target = name.split(".")[1]
                    assert target in PACKAGES[: level + 1], f"{path.relative_to(ROOT)} imports {name}"


def test_files_and_functions_stay_short() -> None:
    for path in BENCH.rglob("*.py"):
        source = path.read_text()
        assert source.count("\n") <= 350, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 80, f"{path}: {node.name}"
