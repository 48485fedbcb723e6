"""`python -m bench`: its commands, and that every page names ones which exist."""

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

from bench import command_line
from bench.harness import results
from tests.support.programs import ROOT, printed

BENCH = ROOT / "bench"
PACKAGES = ("harness", "peers", "tuning", "suites", "report")  # each may import those before it
INTERNAL = {"bench.suites.first_call_process"}  # a process that the suite of first calls starts

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


def parses(words):
    try:
        command_line.parser().parse_args(words)
    except SystemExit as stop:
        return stop.code in (0, None)  # --help
    return True


def named_commands(text):
    """What follows `python -m bench`, or `torchrun ... -m bench`, in a text, up to the end of the command."""
    text = text.replace("\\\n", " ")
    return re.findall(r"(?:python|\$\(PY\)|torchrun [^`\n]*) -m (bench\b[^`#\n\"|>&]*)", text)


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_that_a_text_names_exists(path):
    for command in named_commands(path.read_text()):
        program, *words = shlex.split(re.split(r" {2,}|[:;,.)]\s|[:;,.)]+$", command)[0])
        if program in INTERNAL or words[:1] == ["COMMAND"]:
            continue
        assert program == "bench", f"python -m {command}: there is one program, python -m bench"
        mentioned = len(words) < 2 and words[:1] in ([], *([name] for name in command_line.COMMANDS))
        assert mentioned or parses(words), f"python -m {command}: no such command"


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_of_bench_that_a_text_names_exists(path):
    for name in re.findall(r"(?<!tests/)\bbench/[\w/-]+\.(?:py|cu|md|txt|png)\b", path.read_text()):
        assert (ROOT / name).exists(), name


def test_the_command_of_every_recorded_run_can_be_run_again():
    count = 0
    for path in sorted(results.DIRECTORY.glob("*.json")):
        for header in results.split(results.read(path))[0]:
            program, *words = shlex.split(header["command"])[2:]
            assert program == "bench" and parses(words), header["command"]
            count += 1
    assert count > 8


@pytest.mark.parametrize("name", [None, *command_line.COMMANDS])
def test_help_says_what_a_command_does_and_needs(name, capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.main([name, "--help"] if name else ["--help"])
    assert stop.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for each in [name] if name else command_line.COMMANDS:
        command = command_line.COMMANDS[each]
        assert command.cost[1:] in said and (name or " ".join(command.about.split()) in said)


def test_a_machine_that_measures_needs_pytorch_alone(tmp_path):
    """It has neither the development packages nor the peers."""
    absent = (
        "matplotlib", "pandas", "tabulate", "pytest", "hypothesis", "pybind11", "tqdm", "pylate",
        "fast_plaid", "colpali_engine", "late_interaction_kernels", "flash_maxsim", "maxsim_cpu", "numkong",
    )  # fmt: skip
    words = ["run", "--dry-run", "--suite", "short", "--out", str(tmp_path / "x.json")]
    without = f"import sys; sys.modules.update(dict.fromkeys({absent!r}))"
    program = f"{without}; from bench.command_line import main; sys.exit(main({words!r}))"
    said = printed(sys.executable, "-c", program, cwd=ROOT)
    assert "late-interaction-kernels is not measured" in said


# ---- the packages ----


def test_no_package_imports_one_above_it():
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
                    known = (*PACKAGES[: level + 1], *(["rules"] if level == len(PACKAGES) - 1 else []))
                    assert target in known, f"{path.relative_to(ROOT)} imports {name}"
