"""mutate_python.py [MODULE...]: changes one operator, number or condition of a module at a time, and runs the
tests that execute the changed lines. A change that no test notices is a survivor: a test is missing, or the
change is equivalent and belongs into tools/equivalent_mutants.txt with the reason.

  --sample N       N mutants of each module, always the same ones, instead of all
  --seconds S      at most so many seconds of tests for a mutant (default 20), one variant of every test
                   function first; a survivor says how many of its tests were run

cosmic-ray makes the changes; forked_tests.py says how one is tested without importing PyTorch for each. It
works on a copy of the checkout, .venv/mutants/python. Results are kept in .venv/mutants/results, so that a
run that was stopped goes on where it was; survivors run again.
"""

import argparse
import ast
import functools
import json
import os
import random
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import forked_tests
import mutation

sys.path.append(str(mutation.FOLDER / "site"))
sys.dont_write_bytecode = True

# The tests that a module answers to.
TESTS = {
    "_group.py": "contrastive_ring contrastive_parts contrastive_group group_search contrastive_faults",
    "_checks/dense.py": "argument_edges bad_input messages",
    "_checks/messages.py": "argument_edges messages",
    "_checks/options.py": "argument_edges bad_input messages search search_kinds residual_codec mining",
    "_checks/packed.py": "argument_edges messages varlen score_pairs",
    "_checks/plaid.py": "argument_edges plaid_bad_input messages plaid",
    "_checks/quantized.py": "argument_edges quantized_bad_input messages",
    "_checks/tensors.py": "argument_edges messages bad_input padded varlen search search_kinds fused_head",
    "_contrastive/arguments.py": (
        "contrastive contrastive_single contrastive_tail losses"
        " contrastive_arguments contrastive_threads contrastive_parts"
    ),
    "_contrastive/backward.py": (
        "contrastive contrastive_single contrastive_tail losses"
        " contrastive_passes contrastive_threads kept_blocks"
    ),
    "_contrastive/blocks.py": (
        "contrastive contrastive_single contrastive_tail losses"
        " contrastive_blocks contrastive_parts kept_blocks"
    ),
    "_contrastive/cached.py": "cached_step",
    "_contrastive/check.py": "contrastive contrastive_single contrastive_tail losses contrastive_arguments",
    "_contrastive/forward.py": (
        "contrastive contrastive_single contrastive_tail losses"
        " contrastive_passes contrastive_threads kept_blocks"
    ),
    "_contrastive/function.py": (
        "contrastive contrastive_single contrastive_tail losses"
        " contrastive_passes contrastive_threads contrastive_parts kept_blocks"
    ),
    "_contrastive/gather.py": "contrastive_gather",
    "_contrastive/host_memory.py": "kept_blocks",
    "_contrastive/kept.py": "kept_blocks",
    "_contrastive/labels.py": "contrastive contrastive_single contrastive_tail losses",
    "_contrastive/module.py": "contrastive contrastive_single contrastive_tail losses",
    "_contrastive/own_options.py": "losses losses_parts distillation",
    "_contrastive/panels/products.py": "contrastive_products",
    "_contrastive/panels/scores.py": (
        "contrastive contrastive_single contrastive_sums contrastive_tail losses"
    ),
    "_contrastive/problem.py": "contrastive contrastive_single contrastive_sums contrastive_tail losses",
    "_scoring/products.py": "contrastive contrastive_single contrastive_tail losses",
    "_contrastive/reduction.py": "contrastive contrastive_single contrastive_tail losses",
    "_contrastive/ring.py": "contrastive_ring contrastive_gather contrastive_group losses_group",
    "_contrastive/row_losses/pairwise.py": "losses losses_parts contrastive",
    "_contrastive/row_losses/recall.py": "losses losses_parts contrastive",
    "_contrastive/row_losses/row_function.py": "losses losses_parts contrastive kept_blocks",
    "_contrastive/row_losses/rows.py": "losses losses_parts contrastive",
    "_contrastive/row_losses/sigmoid.py": "losses losses_parts contrastive",
    "_contrastive/shards.py": "contrastive_parts contrastive_gather contrastive_group contrastive losses",
    "_contrastive/single.py": "contrastive contrastive_single contrastive_tail losses",
    "_contrastive/softmax.py": "contrastive contrastive_single contrastive_sums contrastive_tail losses",
    "_contrastive/sums.py": "contrastive_parts contrastive contrastive_single contrastive_tail",
    "_contrastive/tail.py": "contrastive_sums contrastive_tail",
    "_contrastive/tokens.py": "contrastive contrastive_sides contrastive_single contrastive_tail losses",
    "_contrastive/whole.py": "contrastive contrastive_single contrastive_sums contrastive_tail losses",
    "_maxsim.py": (
        "norm_warning forward bad_input precision backward q_weights call_edges oom func threads defaults"
    ),
    "_progress.py": "search search_kinds",
    "_scoring/mean.py": "forward varlen score_pairs q_weights",
    "_scoring/norm_warning.py": "norm_warning",
    "_scoring/normalized.py": "distillation contrastive masked_values",
    "_scoring/packed_call.py": "call_edges varlen score_pairs precision",
    "_scoring/precision.py": "precision threads",
    "_scoring/quantized.py": "quantized_bad_input quantized quantized_ops oom",
    "_scoring/traced.py": "traced call_edges ops q_weights smooth losses",
    "_scoring/untransformed.py": "func",
    "_search/equal_plans.py": "equal_plans",
    "_search/group_search.py": "group_threads",
    "_search/dense.py": "search search_kinds group_search",
    "_search/first_pass.py": "coarse search_kinds muvera no_rank",
    "_search/pieces.py": "search search_kinds quantized_bad_input",
    "_search/prepare.py": "search_kinds",
    "_search/rescore.py": "coarse",
    "_search/result.py": "search_kinds",
    "_search/search.py": "search search_kinds",
    "_search/selection.py": "search search_kinds no_rank",
    "_search/topk.py": "call_edges search search_kinds group_search messages defaults no_rank corpus_threads",
    "_search/topk_state.py": "search",
    "alias.py": "lik",
    "codes.py": "codes quantized_bad_input messages",
    "contrastive.py": "contrastive contrastive_single contrastive_tail losses defaults",
    "distillation/_own.py": "distillation defaults",
    "distillation/losses.py": "distillation defaults",
    "evaluation.py": "evaluation defaults",
    "fused_head.py": "fused_head messages defaults",
    "integrations/_shared/calls.py": "patches vllm",
    "integrations/_shared/compat.py": "compat patches patch_parts",
    "integrations/_shared/exchange.py": "patch_parts patches",
    "integrations/_shared/places.py": "patch_parts patches compat",
    "integrations/_shared/ragged.py": "patch_parts transformers",
    "integrations/_shared/zero_padded.py": "patch_parts transformers mteb",
    "integrations/sentence_transformers/_chunks.py": "sentence_transformers st_edges st_properties",
    "integrations/sentence_transformers/_colbert.py": "sentence_transformers st_edges st_properties",
    "integrations/sentence_transformers/_inputs.py": "sentence_transformers st_edges st_properties",
    "integrations/sentence_transformers/_losses.py": "sentence_transformers st_blocks st_properties",
    "integrations/sentence_transformers/_originals.py": "sentence_transformers st_properties",
    "integrations/sentence_transformers/_ranking.py": "sentence_transformers st_blocks",
    "integrations/sentence_transformers/_similarity.py": "sentence_transformers st_edges st_properties",
    "integrations/sentence_transformers/_weights.py": "sentence_transformers st_edges st_properties",
    "integrations/sentence_transformers/_xtr.py": "st_edges st_properties xtr_patches",
    "losses.py": "losses defaults",
    "plan.py": "plan defaults",
    "pooling.py": "pooling defaults",
    "recall.py": "losses defaults",
    "score_pairs.py": "argument_edges call_edges oom score_pairs messages q_weights defaults",
    "smooth.py": "smooth defaults",
    "xtr.py": "xtr defaults",
    "alignment/__init__.py": "explain defaults",
    "alignment/plot.py": "explain defaults",
    "corpus/_arrow.py": "corpus_arrow",
    "corpus/_chunks.py": "corpus corpus_edges corpus_files no_rank",
    "corpus/_codec_files.py": "corpus_residual corpus_files",
    "corpus/_documents.py": "corpus corpus_edges corpus_files defaults corpus_processes",
    "corpus/_files.py": "corpus_files corpus",
    "corpus/_ids.py": "corpus corpus_files",
    "corpus/_memory.py": "corpus corpus_residual",
    "corpus/_options.py": "corpus corpus_residual",
    "corpus/_parquet.py": "corpus_arrow",
    "corpus/_queries.py": "corpus corpus_residual",
    "corpus/_search.py": "corpus corpus_edges corpus_residual",
    "corpus/_shards.py": "corpus_files group_search corpus_processes",
    "corpus/_tokens.py": "corpus corpus_files corpus_residual",
    "corpus/builder.py": "corpus corpus_files corpus_residual corpus_threads",
    "corpus/corpus.py": "corpus corpus_edges corpus_files corpus_residual defaults",
    "mining/_choice.py": "mining defaults",
    "mining/negatives.py": "mining defaults no_rank",
    "mining/texts.py": "mining defaults",
    "muvera/_first_pass.py": "muvera",
    "muvera/_random_bits.py": "muvera",
    "muvera/encoder.py": "muvera defaults",
    "ops/_oom.py": "oom",
    "ops/_packed.py": "varlen score_pairs q_weights token_weights traced call_edges",
    "ops/_registration.py": "backward call_edges func ops precision varlen traced",
    "ops/dense.py": "backward call_edges func gradcheck oom ops traced",
    "ops/from_hidden/chunking.py": "fused_head fused_head_chunks plan",
    "ops/from_hidden/dispatch.py": "fused_head fused_head_steps ops",
    "ops/from_hidden/driver.py": "fused_head fused_head_steps",
    "ops/from_hidden/dtypes.py": "fused_head fused_head_chunks",
    "ops/from_hidden/fallback.py": "fused_head fused_head_steps fused_head_fallback",
    "ops/muvera.py": "muvera",
    "ops/packed_codes.py": "bits",
    "ops/pairs.py": "call_edges score_pairs traced",
    "ops/plaid.py": "plaid traced",
    "ops/pooling.py": "pooling",
    "ops/quantized.py": "quantized_ops quantized quantized_kernels",
    "ops/smooth/dispatch.py": "smooth",
    "ops/smooth/driver.py": "smooth",
    "ops/smooth/operands.py": "smooth",
    "ops/softmax/cpu.py": "softmax_ops",
    "ops/softmax/dispatch.py": "softmax_ops",
    "ops/varlen.py": "varlen winners traced q_weights call_edges",
    "ops/weighted.py": "q_weights token_weights traced ops",
    "ops/winners.py": "winners traced varlen",
    "ops/xtr.py": "xtr xtr_panels",
    "reference/bits.py": "bits reference_edges",
    "reference/compressed.py": "reference reference_edges",
    "reference/dense.py": "reference reference_edges",
    "reference/hidden.py": "reference reference_edges",
    "reference/muvera.py": "muvera reference_edges",
    "reference/packed.py": "reference reference_edges messages",
    "reference/quantized.py": "reference_edges quantized",
    "reference/smooth.py": "smooth reference_edges",
    "reference/xtr.py": "xtr reference_edges",
}
# Not mutated: __init__ files, ops/_library.py and lik/, which hold names, sentences and signatures;
# _search/stream.py and ops/host_copy.py, which are about a GPU; what patches one library, whose tests need
# releases of requirements/compat.txt.

# What tests run in processes of their own, which nobody traces: mutants are written to disk, and judged by
# all tests that are listed.
ELSEWHERE = {
    "_contrastive/gather.py", "_contrastive/ring.py", "_contrastive/shards.py", "_group.py", "alias.py",
}  # fmt: skip

# Modules whose tests are skipped without pyarrow, which the environment of `make lancedb` has.
NEED_PYARROW = {"corpus/_arrow.py", "corpus/_parquet.py"}

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
    """Line and column ranges that are no behaviour: annotations, whether a dataclass is frozen, and how
    errors and warnings are worded."""
    ranges = []
    for node in ast.walk(ast.parse(source)):
        skipped = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Raise):
            skipped.append(node.exc)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "dataclass"):
            skipped.append(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).strip("_").istitle():
            skipped.append(node.value)  # a name for a type: Progress = bool | Callable[[int, int], None]
        ranges += [
            ((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in skipped if n is not None
        ]
    return ranges


class Mutant(NamedTuple):
    operator: str  # of cosmic-ray
    occurrence: int  # the how-manieth of its places in the module
    line: int

    @property
    def key(self):
        return f"{self.operator} {self.occurrence}"

    def applied_to(self, source):
        from cosmic_ray import plugins
        from cosmic_ray.mutating import mutate_code

        return mutate_code(source, plugins.get_operator(f"core/{self.operator}")(), self.occurrence)


def mutants(source):
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    skipped = passed_over(source)
    nodes = list(ast_nodes(get_ast(source)))
    for name in OPERATORS:
        operator = plugins.get_operator(name)()
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(places):
            mutant = Mutant(name.removeprefix("core/"), occurrence, start[0])
            if any(first <= tuple(start) < last for first, last in skipped):
                continue
            # cosmic-ray takes the stars of f(a, *, b) and {**a} for operators, too, and writes `not a := b`.
            if not re.search("Operator_(Mul|Pow)_|AddNot", name) or compiles(mutant.applied_to(source)):
                yield mutant


def compiles(source):
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def changed_lines(source, mutated):
    """The first line that differs, before and after."""
    before, after = source.splitlines(), mutated.splitlines()
    pairs = [(a.strip(), b.strip()) for a, b in zip(before, after, strict=False) if a != b]
    return pairs[0] if pairs else ("", "")


def statement_lines(source):
    """{line: lines of its innermost statement}; of a compound statement, the lines of its header."""
    ranges = {}
    for node in ast.walk(ast.parse(source)):  # outer statements come first
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
            ranges |= dict.fromkeys(range(node.lineno, last + 1), range(node.lineno, last + 1))
    return ranges


class Module:
    """A module, its mutants, and what became of them."""

    def __init__(self, tree, name, sample):
        self.name, self.file = name, tree / "late_interaction" / name
        self.source = self.file.read_text()
        self.lines = statement_lines(self.source)
        self.mutants = list(mutants(self.source))
        if sample is not None and sample < len(self.mutants):
            self.mutants = random.Random(0).sample(self.mutants, sample)
        # Results are of one text of the module.
        version = mutation.digest(self.file)
        self.path = mutation.FOLDER / "results" / f"{name.replace('/', '.')}.{version}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.killers = {}  # {line: tests that failed on a mutant of it}
        self.began = len(self.results())

    def results(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def known(self):
        """{mutant: (outcome, detail)}. Tests may have come for what survived an earlier run."""
        earlier = [result for result in self.results()[: self.began] if result[1] != "survived"]
        return {key: found for key, *found in [*earlier, *self.results()[self.began :]]}

    def write(self, key, outcome, detail):
        with self.path.open("a") as file:
            print(json.dumps([key, outcome, detail]), file=file)

    def lines_with(self, line):
        return [(str(self.file), number) for number in self.lines.get(line, [line])]

    def left(self):
        known = self.known()
        return [mutant for mutant in self.mutants if mutant.key not in known]


class Recorded:
    """What every test takes and executes, and what is executed before any test runs."""

    def __init__(self, imported, paths):
        self.imported = {(file, line) for file, lines in imported.items() for line in lines}
        self.seconds, self.executing = {}, {}  # {test: seconds}, {(file, line): tests}
        for path in paths:
            for test, (seconds, files) in json.loads(path.read_text()).items():
                self.seconds[test] = seconds
                for file, lines in files.items():
                    for line in lines:
                        self.executing.setdefault((file, line), []).append(test)

    def runs_at_import(self, module, line):
        return not self.imported.isdisjoint(module.lines_with(line))

    def of_files(self, names):
        """{test: seconds} of the tests in files."""
        files = tuple(f"{mutation.file_of_test(name)}::" for name in names.split())
        return {test: taken for test, taken in self.seconds.items() if test.startswith(files)}

    def tests_of(self, module, line, imported):
        """{test: seconds} of those that execute the statement; if it is imported anew, of those that execute
        anything of the module."""
        lines = module.lines_with(line)
        if imported and self.runs_at_import(module, line):
            lines = [executed for executed in self.executing if executed[0] == str(module.file)]
        return {test: self.seconds[test] for line in lines for test in self.executing.get(line, ())}


def judge(module, mutant, tests, seconds, run):
    """Runs tests on a mutant. Returns (outcome, detail). run(names, limit) returns (status, failed test)."""
    likely = module.killers.setdefault(mutant.line, [])
    # One variant of every test function before a second one: what alone can tell may be slow.
    chosen = forked_tests.within(tests, forked_tests.one_of_each_first(tests), seconds)
    chosen += [test for test in likely if test in tests and test not in chosen]
    names = forked_tests.fastest_first({test: tests[test] for test in chosen}, likely)
    if not names:
        return "survived", "no test executes the line"
    status, failed = run(names, 3 * sum(tests[name] for name in names) + 20)
    if failed and failed not in likely:
        likely.append(failed)
    outcome = {forked_tests.PASSED: "survived", forked_tests.TOO_LONG: "timeout"}.get(status, "killed")
    return outcome, failed or f"{len(names)} of {len(tests)} tests were run"


def told(module, out):
    """The mutants that are left, and a line on every 25th."""
    left = module.left()
    for count, mutant in enumerate(left):
        if count % 25 == 0:
            print(f"{module.name}: {count} of {len(left)} mutants", file=out, flush=True)
        yield mutant


def replace_functions(collected, modules, recorded, seconds, out):
    """Judges the mutants that change functions alone. Those that survive and whose line also ran while tests
    were collected are left to write_to_disk."""
    for module in modules:
        if module.name in ELSEWHERE:
            continue
        functions = forked_tests.Functions(module.file, module.source)
        for mutant in told(module, out):
            new = functions.replacements(mutant.applied_to(module.source))
            if not new:
                continue
            tests = recorded.tests_of(module, mutant.line, imported=False)
            found = judge(module, mutant, tests, seconds, functools.partial(collected.run_on, new))
            # What ran before the functions were replaced may still tell.
            if found[0] != "survived" or not recorded.runs_at_import(module, mutant.line):
                module.write(mutant.key, *found)


def write_to_disk(tree, module, recorded, seconds, log):
    """Judges the mutants that are left, of what runs while the package is imported or tests are collected."""

    def run(names, limit):
        return forked_tests.fork(lambda: forked_tests.run_chosen(tree, names), limit + 60, log), ""

    for mutant in told(module, sys.stdout):
        try:
            module.file.write_text(mutant.applied_to(module.source))
            tests = recorded.tests_of(module, mutant.line, imported=True)
            if module.name in ELSEWHERE:
                tests = recorded.of_files(TESTS[module.name])
            module.write(mutant.key, *judge(module, mutant, tests, seconds, run))
        finally:
            module.file.write_text(module.source)


def import_once():
    """What tests import that is not ours: forks have it already."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import sympy  # noqa: F401
    import torch._dynamo
    import torch.fx.experimental.symbolic_shapes
    import torch.nested._internal.nested_tensor
    import torch.testing  # noqa: F401

    if find_spec("sentence_transformers"):
        import sentence_transformers.multi_vector_encoder.evaluation
        import sentence_transformers.multi_vector_encoder.losses  # noqa: F401
        from transformers import BertModel, PreTrainedTokenizerFast  # noqa: F401


def report(module):
    """Prints what survived, and returns how many survivors nobody argued for."""
    name, left, counts = f"late_interaction/{module.name}", 0, dict.fromkeys(OUTCOMES, 0)
    argued, known = mutation.argued(name), module.known()
    for mutant in sorted(module.mutants, key=lambda mutant: mutant.line):
        outcome, detail = known[mutant.key]
        counts[outcome] += 1
        if outcome == "survived":
            before, after = changed_lines(module.source, mutant.applied_to(module.source))
            why = argued.get((before, after))
            left += why is None
            why = why or f"SURVIVED ({detail})"
            print(f"{name}:{mutant.line}: {mutant.key}\n  - {before}\n  + {after}\n  {why}")
    print(f"{name}: {', '.join(f'{n} {o}' for o, n in counts.items())} ({left} not argued)", flush=True)
    return left


OUTCOMES = ("killed", "timeout", "survived")


def record(collected, tree, tests, out):
    """Paths of what files of tests execute. A file is run again once it, or what it tests, has changed."""
    sources = [tree / "late_interaction" / name for name in TESTS]
    common = mutation.digest(
        Path(__file__),
        *sorted((tree / "late_interaction").rglob("*.py")),
        *tree.glob("late_interaction/*.so"),
        *sorted(path for path in (tree / "tests").glob("*.py") if not path.name.startswith("test_")),
    )
    (mutation.FOLDER / "recorded").mkdir(exist_ok=True)
    paths = []
    for test in tests:
        name = f"{Path(test).stem}.{mutation.digest(tree / test)}.{common}.json"
        paths.append(mutation.FOLDER / "recorded" / name)
        if not paths[-1].exists():
            print(f"{test}: which lines it executes", file=out, flush=True)
            if collected.record(sources, paths[-1], test) != forked_tests.PASSED:
                raise SystemExit(f"{test} does not pass without a mutant: see {collected.log}")
    return paths


def run(tree, modules, seconds):
    log, found = mutation.FOLDER / "last.log", mutation.FOLDER / "collected.json"
    tests = sorted({mutation.file_of_test(test) for module in modules for test in TESTS[module.name].split()})
    out = os.fdopen(os.dup(1), "w")
    found.unlink(missing_ok=True)

    def work(collected, imported):
        try:
            paths = record(collected, tree, tests, out)
        except SystemExit as stop:
            return print(stop, file=out, flush=True)
        found.write_text(json.dumps([imported, list(map(str, paths))]))
        return replace_functions(collected, modules, Recorded(imported, paths), seconds, out)

    status = forked_tests.collect(tree, tests, [module.name for module in modules], log, work)
    if status != forked_tests.PASSED or not found.exists():
        raise SystemExit(f"stopped: see {log} and {log.with_suffix('.collected')}")
    imported, paths = json.loads(found.read_text())
    recorded = Recorded(imported, map(Path, paths))
    for module in modules:
        write_to_disk(tree, module, recorded, seconds, log)


def main(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args(arguments)
    lacking = NEED_PYARROW if find_spec("pyarrow") is None else set()
    names = [name.removeprefix("late_interaction/") for name in options.modules]
    names = names or [name for name in TESTS if name not in lacking]
    if unknown := set(names) - set(TESTS):
        raise SystemExit(f"no tests are listed for {', '.join(sorted(unknown))}")
    if skipped := lacking.intersection(names):
        here = f".venv/env/lancedb/bin/python tools/mutate_python.py {' '.join(sorted(skipped))}"
        raise SystemExit(f"their tests need pyarrow: make lancedb, then {here}")
    mutation.environment()
    tree = mutation.fresh_copy("python")
    import_once()
    modules = [Module(tree, name, options.sample) for name in names]
    run(tree, modules, options.seconds)
    return sum([report(module) for module in modules])


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
