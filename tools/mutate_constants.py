"""mutate_constants.py [NAME...]: changes one named constant of csrc/cpu at a time (one more, one less, twice
as much), builds the CPU library anew and runs the tests of the CPU kernels. A change that does not compile,
or that a test notices, is killed.

Many of the constants are sizes of blocks, on which speed depends and results do not: their mutants are
equivalent, and the tests must pass with them. NEUTRAL lists them. That they survive says that the kernels are
right at other sizes too.
"""

import re
import subprocess
import sys

import mutation

# A name and the first number of its value: constexpr int64_t kSumBytes = 256 << 10;
CONSTANT = re.compile(
    r"^[ ]*(?:static |inline )*constexpr \w+ (k\w+) = (?:size_t\{)?(\d+(?:\.\d+)?(?:e\d+)?)", re.M
)
TESTS = "winners forward varlen score_pairs backward pieces isa quantized_kernels plaid"
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
    "kKeep": "the memory that a thread keeps for the next call",
    "kAlign": "the alignment of scratch memory, of which twice as much is an alignment too",
}


def constants(tree):
    for path in sorted((tree / "csrc" / "cpu").iterdir()):
        for match in CONSTANT.finditer(path.read_text()):
            yield path, match


def variants(number):
    value = float(number) if re.search(r"[.e]", number) else int(number)
    return [str(changed) for changed in dict.fromkeys((value + 1, value - 1, 2 * value))]


def outcome(tree):
    """What becomes of a changed tree. Only what includes the changed file is compiled again."""
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    with LOG.open("w") as log:
        if subprocess.run(build, cwd=tree, stdout=log, stderr=log).returncode:
            return "does not compile"
        return tested(tree, log)


def tested(tree, log):
    files = [f"tests/test_{name}.py" for name in TESTS.split()]
    options = ["-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *files], cwd=tree, stdout=log, stderr=log, timeout=3600
        )
    except subprocess.TimeoutExpired:
        return "times out"
    return {0: "survived", 1: "killed"}.get(done.returncode, f"crashes ({done.returncode})")


def main(wanted):
    mutation.environment()
    tree = mutation.fresh_copy("constants")
    if (found := outcome(tree)) != "survived":
        raise SystemExit(f"without a mutant: {found}; see {LOG}")
    left = 0
    for path, match in list(constants(tree)):
        name, number = match.groups()
        if wanted and name not in wanted:
            continue
        source = path.read_text()
        for changed in variants(number):
            try:
                path.write_text(source[: match.start(2)] + changed + source[match.end(2) :])
                found = outcome(tree)
            finally:
                path.write_text(source)
            line = source[: match.start()].count("\n") + 1
            why = NEUTRAL.get(name, "SURVIVED") if found == "survived" else ""
            left += why == "SURVIVED"
            print(f"{path.relative_to(tree)}:{line}: {name} {number} -> {changed}: {found} {why}", flush=True)
    return left


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
