"""Which kernels a time belongs to: a fingerprint of their source."""

import hashlib
import re

from bench.harness.results import ROOT

FOLDER = "csrc/cuda/forward"  # whose kernels `python -m bench plans` times
# A string or character literal, which is kept, or a comment, which is not.
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def bare(source):
    """C++ without comments and white space."""
    code = _TOKEN.sub(lambda m: m[0] if m[0][0] in "\"'" else " ", source)
    return re.sub(r"\s+", "", code)


def sources():
    """The device code of the forward: its .cu files, and all that they include of the project."""
    found = set()
    waiting = [*(ROOT / FOLDER).rglob("*.cu")]
    while waiting:
        path = waiting.pop().resolve()
        if path in found or not path.is_file():
            continue
        found.add(path)
        waiting += [path.parent / name for name in _INCLUDE.findall(path.read_text())]
    return found


def fingerprint():
    """A hash of that source. Formatting, comments and the paths of files do not change it."""
    digests = sorted(hashlib.sha256(bare(path.read_text()).encode()).hexdigest() for path in sources())
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def are_older(header):
    """Whether the times of this run belong to other kernels than those of this checkout."""
    return bool(header.get("kernels") != fingerprint())
