"""Which kernels a time belongs to: a fingerprint of their source."""

from __future__ import annotations

import hashlib
import re

from bench.harness.results import ROOT, Row

FOLDERS = ("csrc/cuda", "csrc/common")
# A string or character literal, which is kept, or a comment, which is not.
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def bare(source: str) -> str:
    """C++ without comments and white space."""
    code = _TOKEN.sub(lambda m: m[0] if m[0][0] in "\"'" else " ", source)
    return re.sub(r"\s+", "", code)


def fingerprint() -> str:
    """A hash of the CUDA kernels' source. Formatting, comments and the paths of files do not change it."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    digests = sorted(hashlib.sha256(bare(path.read_text()).encode()).hexdigest() for path in files)
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def are_older(header: Row) -> bool:
    """Whether the times of this run belong to other kernels than those of this checkout."""
    return bool(header.get("kernels") != fingerprint())
