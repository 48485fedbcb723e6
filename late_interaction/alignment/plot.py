"""Draws what :func:`late_interaction.explain` found: :func:`plot_alignment`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import check_integer, check_positive
from late_interaction.alignment import Alignment, labels_of

__all__ = ["plot_alignment"]


def plot_alignment(
    alignment: Alignment,
    document_tokens: Sequence[str] | None = None,
    *,
    image_grid: tuple[int, int] | None = None,
    first_patch: int = 0,
    ax: Any = None,
) -> Any:
    """Draws how much of the score each document token contributed. Needs matplotlib.

    Args:
        alignment: of :func:`explain`.
        document_tokens: the names of the ``Ld`` document tokens; numbers if None.
        image_grid: ``(height, width)`` in patches: a heat map of ``height * width`` document tokens, row by
            row. None draws a bar for each document token that matched, in the document's order.
        first_patch: the document token that is the image's first patch.
        ax: the matplotlib axes to draw in; new ones if None.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError, ValueError: an argument of a wrong kind, length or value.

    Example:
        >>> import torch
        >>> from late_interaction import explain, plot_alignment
        >>> alignment = explain(torch.eye(2), torch.tensor([[0.0, 3.0], [2.0, 0.0]]))
        >>> plot_alignment(alignment, ["car", "red"]).figure.savefig("shares.png")  # doctest: +SKIP
    """
    if not isinstance(alignment, Alignment):
        raise TypeError(f"alignment must be an Alignment, got {type(alignment).__name__}")
    names = labels_of("document_tokens", document_tokens, len(alignment.shares))
    if ax is not None and not all(hasattr(ax, name) for name in ("bar", "imshow", "set_title", "figure")):
        raise TypeError(f"ax must be matplotlib axes or None, got {abbreviate(ax)}")
    grid = None if image_grid is None else _patches(alignment.shares, image_grid, first_patch)
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError("plot_alignment needs matplotlib: pip install matplotlib") from error
        ax = pyplot.subplots(layout="constrained")[1]
    ax.set_title(f"score {alignment.score:.3f}")
    if grid is not None:
        image = ax.imshow(grid.tolist(), cmap="viridis", interpolation="nearest")
        ax.figure.colorbar(image, ax=ax, label="contribution to the score")
        ax.set_xlabel("patch column")
        ax.set_ylabel("patch row")
        return ax
    matched = alignment.matches[alignment.matches >= 0].unique().tolist()
    ax.bar(range(len(matched)), alignment.shares[matched].tolist())
    # Tokens come from documents: a "$" would otherwise begin a formula.
    labels = [names[token].replace("$", r"\$") for token in matched]
    ax.set_xticks(range(len(matched)), labels, rotation=90 if len(matched) > 8 else 0)
    ax.set_xlabel("document token")
    ax.set_ylabel("contribution to the score")
    return ax


def _patches(shares: Tensor, image_grid: Any, first_patch: Any) -> Tensor:
    if not isinstance(image_grid, (tuple, list)) or len(image_grid) != 2:
        raise TypeError(f"image_grid must be (height, width) or None, got {abbreviate(image_grid)}")
    for side in image_grid:
        check_positive("image_grid", side)
    check_integer("first_patch", first_patch)
    height, width = image_grid
    end = first_patch + height * width
    if first_patch < 0 or end > len(shares):
        raise ValueError(
            f"image_grid and first_patch must lie within the document's {len(shares)} tokens,"
            f" got tokens {first_patch} to {end}"
        )
    return shares[first_patch:end].reshape(height, width)
