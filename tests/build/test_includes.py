"""Nobody includes upwards: each folder of csrc includes those below it, and so do the modules of Python.

csrc, from the bottom:

    common                    problem and tensors: no CUDA
    plan                      the planner: common alone, no CUDA, no PyTorch
    cuda/ptx                  PTX wrappers: nothing
    cuda/primitives           ptx
    cuda/pipeline             primitives
    cuda/runtime              plan
    cuda/forward, /backward   one folder an operator: all of the above
    cuda/varlen, /pairs, ...  operators that build on the forward and the backward (ALLOWED)

Within an operator's folder: kernels <- launchers <- run <- entry (LEVELS).

An arrow that is not allowed fails here.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
SOURCES = (".h", ".cuh", ".cu", ".cpp")

BELOW_OPERATORS = {"common", "plan", "cuda/ptx", "cuda/primitives", "cuda/pipeline", "cuda/runtime"}
ALLOWED = {
    "common": set(),
    "plan": {"common"},
    "cpu": {"common"},
    "ops.cpp": {"common", "plan"},
    "cuda/ptx": set(),
    "cuda/primitives": {"common", "cuda/ptx"},
    "cuda/pipeline": {"common", "cuda/ptx", "cuda/primitives"},
    "cuda/runtime": {"common", "plan"},
    "cuda/forward": BELOW_OPERATORS,
    "cuda/backward": BELOW_OPERATORS | {"cuda/forward"},  # the recomputing backward scores again
    "cuda/varlen": BELOW_OPERATORS | {"cuda/forward", "cuda/backward"},
    "cuda/pairs": BELOW_OPERATORS | {"cuda/forward", "cuda/backward", "cuda/varlen"},
    "cuda/quantized": BELOW_OPERATORS | {"cuda/forward", "cuda/varlen"},
    "cuda/plaid": BELOW_OPERATORS | {"cuda/forward"},
    "cuda/from_hidden": BELOW_OPERATORS | {"cuda/forward", "cuda/backward"},
    "cuda/xtr": BELOW_OPERATORS,
    "cuda/pooling": BELOW_OPERATORS,
    "cuda/muvera": BELOW_OPERATORS,
    "cuda/packed_codes": BELOW_OPERATORS,
    "cuda/host_copy": BELOW_OPERATORS,
    "cuda/softmax": BELOW_OPERATORS,
    "cuda/smooth": BELOW_OPERATORS,
    "cuda/topk": BELOW_OPERATORS,
}

# Within an operator's folder, by file name: no file includes one of a higher level.
LEVELS = (
    (3, re.compile(r"^(entry|recompute)\.cpp$")),
    (2, re.compile(r"^run\.(h|cpp)$")),
    (1, re.compile(r"^(\w*launch\w*\.(cuh|h)|dispatch\.(cpp|cu)|\w+\.cu)$")),
    (0, re.compile("")),
)


def files(root):
    return [path for path in sorted(root.rglob("*")) if path.suffix in SOURCES]


def area(path):
    """ "cuda/forward" of "cuda/forward/sm90_q/kernel.cuh", "plan" of "plan/plan.h", "ops.cpp" of itself."""
    parts = path.split("/")
    return "/".join(parts[: 2 if parts[0] == "cuda" else 1])


def arrows(root):
    """(file, what it includes), relative to csrc."""
    found = set()
    for path in files(root):
        for name in INCLUDE.findall(path.read_text()):
            target = (path.parent / name).resolve()
            assert target.exists(), f"{path} includes {name}, which is not beside it"
            found.add((path.relative_to(root).as_posix(), target.relative_to(root.resolve()).as_posix()))
    return found


def upward(found):
    """Those of the arrows between areas that are not allowed."""
    return {
        (source, target)
        for source, target in found
        if area(source) != area(target) and area(target) not in ALLOWED.get(area(source), set())
    }


def level(path):
    return next(number for number, pattern in LEVELS if pattern.match(path.rsplit("/", 1)[-1]))


@pytest.fixture(scope="module")
def found():
    return arrows(CSRC)


def test_every_folder_has_its_rules(found):
    assert {area(source) for source, _ in found} <= ALLOWED.keys()


def test_no_arrow_runs_upwards(found):
    assert upward(found) == set()


def test_kernels_know_no_launcher_and_launchers_no_entry(found):
    inside = {(a, b) for a, b in found if area(a) == area(b) and area(a) in ALLOWED and a.startswith("cuda/")}
    wrong = {(a, b) for a, b in inside if b.endswith((".h", ".cuh")) and level(a) < level(b)}
    assert wrong == set()
    assert {(a, b) for a, b in found if b.endswith((".cpp", ".cu"))} == set()


def test_the_planner_and_common_know_no_cuda():
    outside = re.compile(r"^\s*#\s*include\s*<([^>]+)>", re.MULTILINE)
    for folder in ("plan", "common"):
        for path in files(CSRC / folder):
            for name in outside.findall(path.read_text()):
                assert not name.startswith("cuda"), f"{path} includes {name}"
                torch = name.startswith("torch/")
                assert not torch or folder == "common", f"{path} includes {name}"


def test_every_file_of_cuda_is_in_a_folder_of_its_operator():
    assert [path.name for path in (CSRC / "cuda").iterdir() if path.is_file()] == []


def test_a_compute_capability_is_asked_in_one_file():
    """Others ask what follows from it: wgmma, rates. cuda/runtime reads it off the GPU, or forces one."""
    asked = {
        path.relative_to(CSRC).as_posix()
        for path in files(CSRC)
        if re.search(r"\b\w*\.?capability\b *[=!<>]=?", path.read_text())
    }
    assert asked == {"plan/device.cpp", "plan/device.h", "cuda/runtime/device.cpp"}


# ---- Python ----


def imports(path):
    """Full names of the modules that a file imports."""
    package = path.relative_to(ROOT).with_suffix("").parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level]) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def modules(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


CALLERS = (
    *("_maxsim", "_contrastive", "_scoring.fast_path", "_scoring.traced"),
    *("_scoring.codes", "_scoring.quantized", "_scoring.sequences"),
    *("_search.stream", "_search.equal_plans", "_search.selection", "_search.exchange"),
    *("_search.group_search", "_search.topk_state"),
)


def python_level(name):
    """0: checks and other private modules; 1: the operators, Tokens and Codes; 2: what calls them; 3: what
    users import, what stands behind Ray, and the doctor; 4: the package itself."""
    parts = name.split(".")[1:]
    if not parts:
        return 4
    if parts[0] in ("codes", "ops", "tokens"):
        return 1
    path = ".".join(parts)
    if path.startswith(CALLERS):
        return 2
    return 0 if path.startswith("_") and not path.startswith(("_doctor", "_ray", "_search.")) else 3


def python_arrows():
    found = set()
    for path in modules("late_interaction"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found |= {(name, target) for target in imports(path) if target != name and is_module(target)}
    return {(a, b) for a, b in found if b.startswith("late_interaction.")}


def test_no_module_imports_one_of_a_higher_level():
    wrong = {(a, b) for a, b in python_arrows() if python_level(a) < python_level(b)}
    assert wrong == set()


def test_checks_know_the_checks_alone():
    checks = {(a, b) for a, b in python_arrows() if a.startswith("late_interaction._checks")}
    known = ("late_interaction._checks", "late_interaction._torch")
    assert checks and {b for _, b in checks if not b.startswith(known)} == set()


def test_an_operator_knows_no_other_but_the_dense_one():
    shared = re.compile(r"late_interaction\.ops\.(_\w+|winners|dense)$")
    for a, b in python_arrows():
        same = a.split(".")[2:3] == b.split(".")[2:3]
        if a.startswith("late_interaction.ops.") and b.startswith("late_interaction.ops.") and not same:
            assert shared.match(b), f"{a} imports {b}"


def test_another_package_s_names_are_no_way_to_the_work():
    """The modules of lik keep paths and signatures: their work has its own. The package names lik."""
    lik = "late_interaction.lik"
    apart = {(a, b) for a, b in python_arrows() if b.startswith(lik) and not a.startswith(lik)}
    assert apart == {("late_interaction", lik)}


def test_python_modules_and_functions_stay_short():
    for path in (*modules("late_interaction"), *modules("bench")):
        text = path.read_text()
        assert text.count("\n") <= 350, f"{path} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                first = node.body[1 if ast.get_docstring(node) else 0 :] or node.body
                lines = node.end_lineno - first[0].lineno + 1
                assert lines <= 80, f"{path}: {node.name} has {lines} lines below its docstring"


def test_the_package_imports_neither_bench_nor_tests():
    for path in modules("late_interaction"):
        assert not any(name.split(".")[0] in ("bench", "tests") for name in imports(path)), path
    for path in modules("bench"):
        assert not any(name.split(".")[0] == "tests" for name in imports(path)), path
