"""Why did it match? Searches ten sentences, explains the best, and draws text and image patches.

    python examples/explain_hit.py                 # a table
    python examples/explain_hit.py --out docs      # and docs/explain_text.png, docs/explain_image.png

The encoders need no weights: a word's embedding is the mean of random vectors of its groups of letters, so
that "sorting" is near "sorts"; a patch's embedding is its colour. A model's embeddings go the same way.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from letters import LetterEncoder, device, padded, words
from torch import Tensor
from torch.nn.functional import normalize

import late_interaction as li

QUERY = "how to sort numbers in a list"
SENTENCES = [
    "A dictionary maps keys to values.",
    "Sorting a list of numbers in place needs no second list.",
    "Numbers may be integers, floats or complex.",
    "A generator yields values one after the other.",
    "The sorted keys of a dictionary come from sorted().",
    "Opening a file in text mode decodes its bytes.",
    "A set holds each of its elements once.",
    "Strings are sequences of characters.",
    "A tuple is a list that cannot be changed.",
    "How a module is found depends on the path.",
]
COLOURS = {
    "white": (1.0, 1.0, 1.0),
    "red": (0.9, 0.1, 0.1),
    "blue": (0.1, 0.2, 0.9),
    "green": (0.1, 0.7, 0.2),
}
GRID = 10, 16  # patches: rows, columns


def explain_text() -> tuple[str, li.Alignment]:
    """The sentence that matches the query best, and why."""
    encoder = LetterEncoder().to(device())
    with torch.no_grad():
        Q, _ = padded(*encoder([QUERY]))
        D, d_mask = padded(*encoder(SENTENCES))
    _, hits = li.search(Q, D, k=1, d_mask=d_mask)
    best = int(hits[0, 0])
    own = D[best, : len(words(SENTENCES[best]))]  # without padding
    return SENTENCES[best], li.explain(Q[0], own)


def page_image() -> Tensor:
    """A picture as a grid of colours: a red house and a blue pond on a green meadow."""
    rows, columns = GRID
    image = torch.tensor(COLOURS["white"]).repeat(rows, columns, 1)
    image[7:] = torch.tensor(COLOURS["green"])
    image[3:8, 2:7] = torch.tensor(COLOURS["red"])
    image[8:, 9:15] = torch.tensor(COLOURS["blue"])
    return image


def explain_image() -> tuple[Tensor, li.Alignment]:
    """Eight query tokens that ask for red and eight for blue; one document token lies before the patches."""
    image = page_image()
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
    patches = normalize((image - 0.5 + 0.02 * noise).flatten(0, 1), dim=-1)
    document = torch.cat([torch.zeros(1, 3), patches])
    asked = [COLOURS["red"], COLOURS["blue"]]
    # A model's tokens differ from one another, and so do these.
    spread = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    query = normalize(torch.tensor(asked).repeat_interleave(8, 0) - 0.5 + 0.03 * spread, dim=-1)
    return image, li.explain(query.to(device()), document.to(device()))


def draw(folder: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sentence, alignment = explain_text()
    figure = Figure(figsize=(8, 3.6), dpi=130, layout="constrained")
    ax = li.plot_alignment(alignment, words(sentence), ax=figure.subplots())
    ax.set_title(f"“{QUERY}”: score {alignment.score:.3f}")
    FigureCanvasAgg(figure).print_png(str(folder / "explain_text.png"))

    image, alignment = explain_image()
    figure = Figure(figsize=(9, 3.0), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(image.tolist(), interpolation="nearest")
    left.set_title("the image's patches")
    li.plot_alignment(alignment, image_grid=GRID, first_patch=1, ax=right)
    FigureCanvasAgg(figure).print_png(str(folder / "explain_image.png"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a folder for the pictures; needs matplotlib")
    args = parser.parse_args()
    sentence, alignment = explain_text()
    print(sentence)
    print(alignment.text(words(QUERY), words(sentence)))
    if args.out:
        draw(args.out)


if __name__ == "__main__":
    main()
