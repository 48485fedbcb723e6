"""Figures, plain tables and errors as text."""

from __future__ import annotations

import re
from collections.abc import Sequence


def error_text(error: BaseException) -> str:
    """Return an error for a row: its kind and the start of its text, file names without their folders."""
    return f"{type(error).__name__}: {without_folders(str(error).strip())[:300]}"


def without_folders(text: str) -> str:
    return re.sub(r"(?:/[\w.+@-]+)+/(?=[\w.+@-])", "", text)


def number(value: float | None) -> str:
    """Write a figure as a reader wants it: three digits below ten, none behind the point above a hundred."""
    if value is None or value != value:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def align(head: Sequence[str], body: Sequence[Sequence[str]], left: int = 1) -> str:
    """Align a plain text table: the first `left` columns flush left, the figures flush right."""
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    lines = []
    for row in [head, ["-" * w for w in widths], *body]:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in cells).rstrip())
    return "\n".join(lines)
