"""Figures, plain tables and errors as text."""

from __future__ import annotations

import re
from collections.abc import Sequence


def error_text(error: BaseException) -> str:
    """An error for a row: its kind and the start of its text, file names without their folders."""
    text = re.sub(r"(?:/[\w.+@-]+)+/(?=[\w.+@-])", "", str(error).strip())
    return f"{type(error).__name__}: {text[:300]}"


def number(value: float | None) -> str:
    """A figure as a reader wants it: three digits below ten, no decimals above a hundred; "-" for none."""
    if value is None or value != value:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def align(head: Sequence[str], body: Sequence[Sequence[str]], left: int = 1) -> str:
    """A plain text table: the first `left` columns flush left, the figures flush right."""
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    lines = []
    for row in [head, ["-" * w for w in widths], *body]:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in cells).rstrip())
    return "\n".join(lines)
