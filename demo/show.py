"""What the reader sees: headings, tables, progress bars, and the picture of one alignment."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

WIDTH = 88
# Every progress bar of the demo looks the same.
BAR: dict[str, Any] = {
    "ncols": WIDTH,
    "bar_format": "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}, {elapsed}{postfix}",
}


def heading(title: str) -> None:
    print(f"\n{title}\n{'-' * len(title)}", flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Columns two spaces apart, each '<' left or '>' right aligned as `align` says.

    >>> print(table(["token", "score"], [["sort", "0.9"]], "<>"))
       token  score
       sort     0.9
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (
        "   "
        + "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True))
        for row in [header, *rows]
    )
    return "\n".join(line.rstrip() for line in lines)


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def in_context(tokens: Sequence[str], at: int, around: int = 3) -> str:
    """The token at `at`, bracketed, among its neighbouring words; word pieces (##es) joined to theirs.

    >>> in_context(["[CLS]", "push", "##es", "an", "item"], 2)
    'push[es] an item'
    """
    words: list[str] = []
    home = 0
    for i, token in enumerate(tokens):
        text = token.removeprefix("##")
        if i == at:
            text = f"[{text.strip('[]') or text}]"
        elif token in ("[CLS]", "[SEP]"):
            continue
        if token.startswith("##") and words:
            words[-1] += text
        else:
            words.append(text)
        if i == at:
            home = len(words) - 1
    return " ".join(words[max(0, home - around) : home + around + 1])


def alignment_rows(
    query: Sequence[str], document: Sequence[str], similarity: Tensor, winners: Tensor
) -> list[tuple[str, str, str]]:
    """One row per query token: the token, the similarity of its winner, the winner in its context.

    `similarity` is [Lq, Ld]; `winners` [Lq] holds each query token's document token, -1 for none.
    """
    rows = []
    for token, row, winner in zip(query, similarity.tolist(), winners.tolist(), strict=True):
        matched = (f"{row[winner]:.2f}", in_context(document, winner)) if winner >= 0 else ("", "none")
        rows.append((token, *matched))
    return rows


def alignment_picture(
    path: Path,
    title: str,
    query: Sequence[str],
    document: Sequence[str],
    similarity: Tensor,
    winners: Tensor,
) -> None:
    """Write a PNG of `similarity` [Lq, Ld] with each query token's winner ringed; whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lq, ld = similarity.shape
    figure = Figure(figsize=(3.0 + 0.25 * ld, 2.0 + 0.25 * lq), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(similarity.float().cpu().numpy(), cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    rows = [s for s, winner in enumerate(winners.tolist()) if winner >= 0]
    columns = [winner for winner in winners.tolist() if winner >= 0]
    axes.scatter(columns, rows, s=70, facecolors="none", edgecolors="#d9480f", linewidths=1.8, label="winner")
    axes.set_xticks(range(ld), document, rotation=90, fontsize=8)
    axes.set_yticks(range(lq), query, fontsize=9)
    axes.set_xticks([t - 0.5 for t in range(1, ld)], minor=True)
    axes.set_yticks([s - 0.5 for s in range(1, lq)], minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("document tokens")
    axes.set_ylabel("query tokens")
    axes.set_title(title, loc="left", fontsize=11)
    figure.colorbar(image, ax=axes, label="similarity", fraction=0.04, pad=0.015).outline.set_visible(False)

    png = io.BytesIO()
    figure.savefig(png, format="png")
    part = path.with_suffix(".part")
    try:
        part.write_bytes(png.getvalue())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
