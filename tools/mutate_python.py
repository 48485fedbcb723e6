"""mutate_python.py [MODULE...]: changes one operator, number or condition of a module at a time, and runs the
tests that the module has. A change that no test notices is a survivor: a test is missing, or the change is
equivalent and belongs into tools/equivalent_mutants.txt with the reason.

cosmic-ray makes the changes. Its own runner starts an interpreter for each, which takes seconds to import
PyTorch; this one imports it once and forks. It works on a copy of the checkout, .venv/mutants/python, and
keeps what it found in .venv/mutants/results, so that a run that was stopped goes on where it was.
"""

import ast
import hashlib
import json
import os
import signal
import sys
import time

import mutation

sys.path.append(str(mutation.FOLDER / "site"))
sys.dont_write_bytecode = True

# The tests that a module answers to, the likeliest to fail first. They run with pytest -x, on the CPU.
TESTS = {
    "_checks/dense.py": "bad_input messages",
    "_checks/from_hidden.py": "fused_head messages",
    "_checks/messages.py": "messages",
    "_checks/options.py": "bad_input messages retrieve",
    "_checks/packed.py": "messages varlen score_pairs",
    "_checks/padded.py": "padded messages",
    "_checks/plaid.py": "plaid_bad_input messages plaid",
    "_checks/quantized.py": "quantized_bad_input messages",
    "_checks/search.py": "quantized_bad_input retrieve messages",
    "_checks/tensors.py": "messages bad_input padded varlen retrieve fused_head",
    "_compat.py": "compat",
    "_maxsim.py": "norm_warning forward bad_input precision backward",
    "_packed_call.py": "varlen score_pairs precision",
    "_precision.py": "precision",
    "_progress.py": "retrieve",
    "_quantized.py": "quantized_bad_input quantized",
    "forward.py": "forward bad_input",
    "fp8.py": "quantized quantized_bad_input",
    "fused_head.py": "fused_head messages",
    "int8.py": "quantized quantized_bad_input",
    "padded.py": "padded messages",
    "plaid.py": "plaid plaid_bad_input",
    "plan.py": "plan",
    "retrieve.py": "retrieve messages",
    "score_pairs.py": "score_pairs messages",
    "topk.py": "retrieve messages",
    "varlen.py": "varlen messages",
    "backward/_saved.py": "backward bad_input",
    "backward/lowmem.py": "backward",
    "backward/unified.py": "backward",
    "ops/_oom.py": "oom",
    "ops/_packed.py": "varlen score_pairs",
    "ops/_registration.py": "backward ops precision",
    "ops/dense.py": "backward ops",
    "ops/from_hidden/chunking.py": "fused_head plan",
    "ops/from_hidden/dispatch.py": "fused_head ops",
    "ops/from_hidden/driver.py": "fused_head",
    "ops/from_hidden/dtypes.py": "fused_head",
    "ops/from_hidden/fallback.py": "fused_head",
    "ops/pairs.py": "score_pairs",
    "ops/plaid.py": "plaid",
    "ops/plaid_cpu.py": "plaid",
    "ops/quantized.py": "quantized_ops",
    "ops/varlen.py": "varlen",
    "ops/winners.py": "winners",
    "reference/compressed.py": "reference",
    "reference/dense.py": "reference",
    "reference/hidden.py": "reference",
    "reference/packed.py": "reference messages",
    "reference/quantized.py": "reference",
}
# Not mutated: __init__ files, autograd.py and ops/_library.py, which hold names and sentences; _stream.py and
# ops/host_copy.py, which are about a GPU; the patches, whose tests need releases of requirements/compat.txt.

# Boundaries and negations of comparisons, and the operation that is most like another. The other replacements
# of cosmic-ray fail at once (`x << 2.5`) or do what one of these does (`is` for `==` on small integers).
_COMPARISONS = (
    "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_GtE Gt_LtE Eq_NotEq NotEq_Eq NotEq_Gt NotEq_Lt Is_IsNot IsNot_Is"
)
_BINARY = (
    "Add_Sub Sub_Add Mul_Add Div_Mul FloorDiv_Mul FloorDiv_Add Mod_Mul Pow_Mul"
    " BitAnd_BitOr BitOr_BitAnd BitXor_BitOr LShift_RShift RShift_LShift"
)
OPERATORS = [
    *(f"core/ReplaceComparisonOperator_{name}" for name in _COMPARISONS.split()),
    *(f"core/ReplaceBinaryOperator_{name}" for name in _BINARY.split()),
    *(f"core/ReplaceUnaryOperator_Delete_{name}" for name in ("Invert", "Not", "USub")),
    *(f"core/Replace{name}" for name in ("AndWithOr", "OrWithAnd", "TrueWithFalse", "FalseWithTrue")),
    *(f"core/{name}" for name in ("AddNot", "NumberReplacer", "ZeroIterationForLoop", "ExceptionReplacer")),
    *(f"core/{name}" for name in ("ReplaceBreakWithContinue", "ReplaceContinueWithBreak")),
]


def passed_over(source):
    """Line and column ranges that are no behaviour: annotations, and the wording of errors and warnings."""
    ranges = []
    for node in ast.walk(ast.parse(source)):
        skipped = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Raise):
            skipped.append(node.exc)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            skipped.append(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).strip("_").istitle():
            skipped.append(node.value)  # a name for a type: Progress = bool | Callable[[int, int], None]
        ranges += [
            ((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in skipped if n is not None
        ]
    return ranges


def mutants(source):
    """(operator, occurrence, first line, mutated source) of every change."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code

    skipped = passed_over(source)
    nodes = list(ast_nodes(get_ast(source)))
    for name in OPERATORS:
        operator = plugins.get_operator(name)()
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(places):
            if not any(first <= tuple(start) < last for first, last in skipped):
                yield (
                    name.removeprefix("core/"),
                    occurrence,
                    start[0],
                    mutate_code(source, operator, occurrence),
                )


def changed_lines(source, mutated):
    """The first line that differs, before and after."""
    before, after = source.splitlines(), mutated.splitlines()
    pairs = [(a.strip(), b.strip()) for a, b in zip(before, after, strict=False) if a != b]
    return pairs[0] if pairs else ("", "")


def run_tests(tree, tests, limit):
    """pytest's exit status in a fork of this process, or None where it took too long."""
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(mutation.FOLDER / "last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        import pytest

        options = ["-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
        files = [f"tests/test_{name}.py" for name in tests.split()]
        os._exit(int(pytest.main([*options, *files])))
    ends = time.monotonic() + limit
    while time.monotonic() < ends:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def import_once():
    """What tests import that is not ours: forks have it already."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import sympy  # noqa: F401
    import torch._dynamo
    import torch.fx.experimental.symbolic_shapes
    import torch.nested._internal.nested_tensor
    import torch.testing  # noqa: F401


def mutate_module(tree, module):
    """Prints what survived, and returns how many survivors nobody argued for."""
    file = tree / "late_interaction" / module
    source = (mutation.ROOT / "late_interaction" / module).read_text()
    file.write_text(source)
    began = time.monotonic()
    if run_tests(tree, TESTS[module], 1800) != 0:
        raise SystemExit(f"{module}: its tests fail without a mutant; see {mutation.FOLDER / 'last.log'}")
    taken = time.monotonic() - began

    known = recall(module, source)
    record = record_of(module, source).open("a")
    outcomes = {}
    for operator, occurrence, line, mutated in mutants(source):
        key = f"{operator} {occurrence}"
        if key not in known:
            file.write_text(mutated)
            try:
                status = run_tests(tree, TESTS[module], 3 * taken + 30)
            finally:
                file.write_text(source)
            known[key] = {0: "survived", None: "timeout"}.get(status, "killed")
            print(json.dumps([key, known[key]]), file=record, flush=True)
        outcomes[key] = (known[key], line, changed_lines(source, mutated))
    return report(module, outcomes, taken)


def record_of(module, source):
    """Results are of one text of the module."""
    version = hashlib.sha256(source.encode()).hexdigest()[:12]
    return mutation.FOLDER / "results" / f"{module.replace('/', '.')}.{version}.jsonl"


def recall(module, source):
    """What an earlier run found out. Survivors run again: tests may have come for them."""
    path = record_of(module, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {key: outcome for key, outcome in found if outcome != "survived"}


def report(module, outcomes, taken):
    name, left = f"late_interaction/{module}", 0
    argued = mutation.argued(name)
    for key, (outcome, line, (before, after)) in outcomes.items():
        if outcome == "survived":
            why = argued.get((before, after))
            left += why is None
            print(f"{name}:{line}: {key}\n  - {before}\n  + {after}\n  {why or 'SURVIVED'}")
    counts = [
        [outcome for outcome, _, _ in outcomes.values()].count(o) for o in ("killed", "timeout", "survived")
    ]
    print(
        f"{name}: {counts[0]} killed, {counts[1]} timeouts, {counts[2]} survived ({left} not argued);",
        end=" ",
    )
    print(f"its tests take {taken:.0f} s", flush=True)
    return left


def main(wanted):
    modules = [name.removeprefix("late_interaction/") for name in wanted] or list(TESTS)
    if unknown := set(modules) - set(TESTS):
        raise SystemExit(f"no tests are listed for {', '.join(sorted(unknown))}")
    mutation.environment()
    tree = mutation.fresh_copy("python")
    import_once()

    return sum([mutate_module(tree, module) for module in modules])


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
