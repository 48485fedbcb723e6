"""mutate_constants.py [NAME...]: changes one named constant of csrc/cpu at a time (one more, one less, twice
as much), builds the CPU library anew and runs the tests of the CPU kernels. A change that does not compile,
or that a test notices, is killed.

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
import subprocess
import sys

import forked_tests
import mutate_python
import mutation

# A name and the first number of its value: constexpr int64_t kSumBytes = 256 << 10;
CONSTANT = re.compile(
    r"^[ ]*(?:static |inline )*constexpr \w+ (k\w+) = (?:size_t\{)?(\d+(?:\.\d+)?(?:e\d+)?)", re.M
)
TESTS = (
    "winners forward varlen score_pairs backward splits isa quantized_kernels plaid bits xtr pooling muvera"
)
LOG = mutation.FOLDER / "constants.log"
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
    "kTileRows": "rows of distances that are mirrored at a time, or of tokens that are multiplied",
    "kTileColumns": "columns of them",
    "kLeastCompacted": "rows of distances from which on dead ones are dropped",
    "kDocumentsPerItem": "documents of an item of work",
    "kRowsAhead": "how early rows of a table are prefetched",
    "kCentroidsAhead": "how early centroids are prefetched",
    "kLine": "from one prefetch of a row to the next",
    "kRowsAtOnce": "rows that are decompressed at a time",
    "kSegment": "cells whose maximum is compared with a bound first",
    "kKeep": "the memory that a thread keeps for the next call",
    "kAlign": "the alignment of scratch memory, of which twice as much is an alignment too",
}


def constants(tree):
    for path in sorted(path for path in (tree / "csrc" / "cpu").rglob("*") if path.is_file()):
        for match in CONSTANT.finditer(path.read_text()):
            yield path, match


def variants(number):
    value = float(number) if re.search(r"[.e]", number) else int(number)
    return [str(changed) for changed in dict.fromkeys((value + 1, value - 1, 2 * value))]


def build(tree):
    """Whether a changed tree compiles. Only what includes the changed file is compiled again."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    with LOG.open("w") as log:
        return subprocess.run(command, cwd=tree, stdout=log, stderr=log).returncode == 0


def seconds_of_tests(tree, tests):
    """{test: seconds} of files of tests, of the library as it is. Kept for the next run."""
    files, found = [mutation.file_of_test(name) for name in tests], {}
    sources = sorted(path for path in (tree / "csrc").rglob("*") if path.is_file())
    version = mutation.digest(*sources, *(tree / file for file in files))
    path = mutation.FOLDER / f"seconds-of-tests.{version}.json"

    def work(collected, _):
        for file in files:
            if collected.record([], path.with_suffix(".one"), file) != forked_tests.PASSED:
                return
            found.update(json.loads(path.with_suffix(".one").read_text()))
        path.write_text(json.dumps(found))

    if not path.exists():
        forked_tests.collect(tree, files, [], LOG, work)
    if not path.exists():
        raise SystemExit(f"the tests do not pass without a change: see {LOG}")
    return {test: taken for test, (taken, _) in json.loads(path.read_text()).items()}


def tested(tree, seconds, names):
    limit = 3 * sum(seconds[name] for name in names) + 120
    status = forked_tests.fork(lambda: forked_tests.run_chosen(tree, names), limit, LOG)
    if status == forked_tests.TOO_LONG:
        return "times out"
    return {0: "survived", 1: "killed"}.get(status, f"crashes ({status})")


def changes(tree, wanted, sample):
    """(path, match, value) of what is changed to what."""
    found = [
        (path, match, value)
        for path, match in constants(tree)
        if not wanted or match[1] in wanted
        for value in variants(match[2])
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
    names = forked_tests.within(seconds, forked_tests.one_of_each_first(seconds), options.seconds)
    print(f"{len(names)} of {len(seconds)} tests for each change", flush=True)
    left = 0
    for path, match, value in changes(tree, options.names, options.sample):
        source = path.read_text()
        try:
            path.write_text(source[: match.start(2)] + value + source[match.end(2) :])
            found = tested(tree, seconds, names) if build(tree) else "does not compile"
        finally:
            path.write_text(source)
        line = source[: match.start()].count("\n") + 1
        why = NEUTRAL.get(match[1], "SURVIVED") if found == "survived" else ""
        left += why == "SURVIVED"
        print(
            f"{path.relative_to(tree)}:{line}: {match[1]} {match[2]} -> {value}: {found} {why}".rstrip(),
            flush=True,
        )
    return left


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
