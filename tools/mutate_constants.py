"""mutate_constants.py [NAME...]: changes one named constant of csrc/cpu at a time (one more, one less, twice
as much), builds the CPU library anew and runs the tests of the CPU kernels that its file is part of. A change
that does not compile, or that a test notices, is killed. A NAME is a constant, or the end of a file's path:
kLanes, muvera/avx2.cpp.

  --sample N       N changes, always the same ones, instead of all
  --seconds S      at most so many seconds of tests for a change (default 60), one of every function first
  --tests T...     these files of tests alone, "winners isa" say

Many of the constants are sizes of blocks, on which speed depends and results do not: their mutants are
equivalent, and the tests must pass with them. NEUTRAL lists them. That they survive says that the kernels are
right at other sizes too.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import forked_tests
import mutate_python
import mutation

DECLARATION = re.compile(r"^[ ]*(?:static |inline )*constexpr [\w:]+ (k\w+ = [^;]*);", re.M)
# A name and the first number of its value: kSumBytes = 256 << 10, kExponent = 0x7F800000.
CONSTANT = re.compile(r"\b(k\w+) = [^,]*?(?<![\w.])(0x[\dA-Fa-f]+|\d+(?:\.\d+)?(?:e\d+)?)")
TESTS = (
    "winners forward varlen score_pairs backward splits isa quantized_kernels plaid bits xtr pooling muvera"
)
# Tests of what has this in its path; everything else is tested by all of TESTS.
TESTS_OF = {
    "muvera": "isa muvera",
    "pooling": "pooling",
    "isa/hamming": "isa bits",
    "avx512_popcnt": "isa bits",
    "pack": "isa quantized_kernels plaid bits",
    "xtr": "xtr",
    "centroid_scores": "plaid",
    "residual": "isa plaid",
    "widening": "isa quantized_kernels",
    "avx512_bf16": "isa",
    "cpu/kernels.h": "isa",
}
# Programs of tests/cpp that include the file and need no PyTorch. They run it where the CPU does not.
PROGRAM_OF = {"isa/x86/amx.inc.h": "test_amx"}
# Kernels of aarch64 are compiled and run by this test, where a cross compiler and an emulator are.
EMULATED = "tests/build/test_aarch64.py::test_kernels_run_on_an_emulated_cpu"
EMULATED_NEEDS = "aarch64-linux-gnu-g++", "qemu-aarch64"
LOG = mutation.FOLDER / "constants.log"
# By name, or by change where only that one changes no result.
NEUTRAL = {
    "kSumBytes": "how many queries' sums a block of the backward holds",
    "kDocumentBytes": "how many documents a block of the backward gathers from",
    "kMaxDocuments": "the most documents of such a block",
    "kItemsPerThread": "into how many items work is cut",
    "kChunk": "winners that are sorted at a time",
    "kPanelBytes": "query rows of a block",
    "kMaxBlockRows": "the most query rows of a block",
    "kTileBytes": "document tokens of a tile",
    "kMaxTileTokens": "the most document tokens of a tile",
    "kMinItemWork": "below which work is not cut",
    "kMinPartTokens": "below which a document is not cut",
    "kSerialWork": "below which one thread does it all",
    "kGroup": "document tokens whose accumulators are registers at a time",
    "kChains": "independent sums; the order of additions, within the tolerance of the tests",
    "kAhead": "how early rows are prefetched",
    "kTileRows": "rows of distances that are mirrored at a time",
    "kTileColumns": "columns of them",
    "kLeastCompacted": "rows of distances from which on dead ones are dropped",
    "kDocumentsPerItem": "documents of an item of work",
    "kRowsAhead": "how early rows of a table are prefetched",
    "kCentroidsAhead": "how early centroids are prefetched",
    "kLine": "from one prefetch of a row to the next",
    "kRowsAtOnce": "rows that are decompressed, or multiplied, at a time",
    "kSegment": "cells whose maximum is compared with a bound first",
    "kKeep": "the memory that a thread keeps for the next call",
    "kAlign": "the alignment of scratch memory, of which twice as much is an alignment too",
    "kFoldTokens": "tokens whose similarities are folded at a time",
    "kWide": "tokens whose differing bits are counted in registers at a time",
    "kNarrow": "tokens of such a group at the end of a tile",
    "kLines": "lines that are prefetched while a group is multiplied",
    "kCount": "an element whose size alone is asked for",
    "kReal": "a dtype that the packing of fp64 does not read",
    "kFurther 1 -> 2": "twice the distance between neighbours of a hypercube, in the same order",
    "kNone 1 -> 2": "further away than any partition, too",
    "kMaxInt8Dims 1 -> 0": "codes multiply as floats then, within the tolerance of the tests",
    "kMaxSteps 31 -> 30": "words that are counted before counts of bytes are added up; 31 are the most",
    "kMaxSteps 0 -> 1": "counts of 32 bits may be added up after each word, too",
}


class Constant(NamedTuple):
    path: Path
    name: str
    number: str
    start: int  # of the number in the file

    def is_wanted(self, names):
        return not names or self.name in names or self.path.as_posix().endswith(tuple(names))

    def is_of_aarch64(self):
        return "aarch64" in self.path.parts

    def is_tested(self):
        """Whether tests can run it on this machine. Where they cannot, every mutant would survive."""
        emulated = all(map(shutil.which, EMULATED_NEEDS))
        return emulated if self.is_of_aarch64() else self.path.name != "tiles_amx.h"

    def changed(self, source, value):
        return source[: self.start] + value + source[self.start + len(self.number) :]


def constants(tree):
    for path in sorted(path for path in (tree / "csrc" / "cpu").rglob("*") if path.is_file()):
        for declaration in DECLARATION.finditer(path.read_text()):
            for match in CONSTANT.finditer(declaration[1]):
                yield Constant(path, match[1], match[2], declaration.start(1) + match.start(2))


def variants(number):
    value = float(number) if re.search(r"\d[.e]", number) and "x" not in number else int(number, 0)
    return [str(changed) for changed in dict.fromkeys((value + 1, value - 1, 2 * value)) if changed != value]


def chosen_of(table, path, default):
    return next((tests for part, tests in table.items() if part in path.as_posix()), default)


def why_neutral(name, number, value):
    return NEUTRAL.get(name) or NEUTRAL.get(f"{name} {number} -> {value}")


def build(tree):
    """Whether a changed tree compiles. Only what includes the changed file is compiled again."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    with LOG.open("w") as log:
        return subprocess.run(command, cwd=tree, stdout=log, stderr=log).returncode == 0


def seconds_of_tests(tree, tests):
    """{test: seconds} of files of tests, of the library as it is. Kept for the next run, file by file."""
    sources = sorted(path for path in (tree / "csrc").rglob("*") if path.is_file())
    library, kept = mutation.digest(*sources), {}
    for file in map(mutation.file_of_test, tests):
        version = mutation.digest(tree / file)
        kept[file] = mutation.FOLDER / f"seconds-of.{Path(file).stem}.{library}.{version}.json"
    missing = [file for file, path in kept.items() if not path.exists()]

    def work(collected, _):
        for file in missing:
            part = kept[file].with_suffix(".part")
            if collected.record([], part, file) != forked_tests.PASSED:
                return
            part.rename(kept[file])

    if missing:
        forked_tests.collect(tree, missing, [], LOG, work)
    if not all(path.exists() for path in kept.values()):
        raise SystemExit(f"the tests do not pass without a change: see {LOG}")
    return {
        test: taken for path in kept.values() for test, (taken, _) in json.loads(path.read_text()).items()
    }


def chosen_tests(seconds, names, limit, path):
    """{test: seconds} of the tests of `names` that run for one change of `path`. Those of the instruction set
    that the file is for come first."""
    files = tuple(f"{mutation.file_of_test(name)}::" for name in names)
    isa = re.search(r"portable|avx2|avx512_bf16|avx512", path.name)
    parts = {True: {}, False: {}}
    for test, taken in seconds.items():
        if test.startswith(files):
            parts[isa is not None and f"[{isa[0]}-" in test.replace("]", "-")][test] = taken
    order = [test for own in parts.values() for test in forked_tests.one_of_each_first(own)]
    return {test: seconds[test] for test in forked_tests.within(seconds, order, limit)}


def tested(tree, chosen):
    limit = 3 * sum(chosen.values()) + 60
    status = forked_tests.fork(lambda: forked_tests.run_chosen(tree, list(chosen)), limit, LOG)
    if status == forked_tests.TOO_LONG:
        return "times out"
    return {0: "survived", 1: "killed"}.get(status, f"crashes ({status})")


def told_by(command, tree, limit):
    """What a command of tests says by its exit status."""
    with LOG.open("a") as log:
        try:
            status = subprocess.run(command, cwd=tree, stdout=log, stderr=log, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return "times out"
    return {0: "survived", 1: "killed"}.get(status, f"crashes ({status})")


def judged(tree, constant, seconds, options):
    """What becomes of a change of a constant, which is on disk."""
    LOG.write_text("")
    if not constant.is_tested():
        return "not tested here"
    if constant.is_of_aarch64():
        return told_by([sys.executable, "-m", "pytest", "-q", EMULATED], tree, 300)
    if name := chosen_of(PROGRAM_OF, constant.path, None):
        program = mutation.FOLDER / name
        compiler = ["c++", "-std=c++20", "-O2", f"tests/cpp/{name}.cpp", "-o", str(program)]
        return (
            told_by([program], tree, 30) if told_by(compiler, tree, 300) == "survived" else "does not compile"
        )
    if not build(tree):
        return "does not compile"
    wanted = chosen_of(TESTS_OF, constant.path, TESTS).split()
    names = [name for name in wanted if name in options.tests] or options.tests
    return tested(tree, chosen_tests(seconds, names, options.seconds, constant.path))


def changes(tree, wanted, sample):
    """(constant, value) of what is changed to what."""
    found = [
        (constant, value)
        for constant in constants(tree)
        if constant.is_wanted(wanted)
        for value in variants(constant.number)
    ]
    return found if sample is None or sample >= len(found) else random.Random(0).sample(found, sample)


def main(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tests", nargs="+", default=TESTS.split(), choices=TESTS.split())
    options = parser.parse_args(arguments)
    mutation.environment()
    tree = mutation.fresh_copy("constants")
    mutate_python.import_once()
    if not build(tree):
        raise SystemExit(f"it does not compile without a change: see {LOG}")
    seconds = seconds_of_tests(tree, options.tests)
    left = 0
    for constant, value in changes(tree, options.names, options.sample):
        path, name, number, start = constant
        source = path.read_text()
        try:
            path.write_text(constant.changed(source, value))
            found = judged(tree, constant, seconds, options)
        finally:
            path.write_text(source)
        line = source[:start].count("\n") + 1
        why = why_neutral(name, number, value) or "SURVIVED" if found == "survived" else ""
        left += why == "SURVIVED"
        print(
            f"{path.relative_to(tree)}:{line}: {name} {number} -> {value}: {found} {why}".rstrip(), flush=True
        )
    return left


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
