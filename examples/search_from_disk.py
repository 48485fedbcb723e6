"""Searching a corpus that lies in a file, stopped in the middle and resumed.

    python examples/search_from_disk.py            # writes 18 MB to a temporary folder

The corpus is written as float16, document by document, padded to one length. The search maps the file into
memory and reads it in parts; after half of them it saves its state, and another search goes on from there.
The result is that of a search over the whole corpus in memory, or the program ends with an error.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from letters import DIM, LONGEST, LetterEncoder, device, mrr, padded, texts
from torch import Tensor
from torch.nn.functional import pad

import late_interaction as li
from late_interaction import TopK

TOP = 10


def write(folder: Path, encoder: LetterEncoder, documents: list[str], part: int) -> tuple[int, ...]:
    """Encodes documents a part at a time into tokens.f16 and mask.bool. Returns the shape of the tokens."""
    with (folder / "tokens.f16").open("wb") as tokens, (folder / "mask.bool").open("wb") as masks:
        for begin in range(0, len(documents), part):
            with torch.no_grad():
                D, mask = padded(*encoder(documents[begin : begin + part]))
            room = LONGEST - D.shape[1]
            tokens.write(pad(D, (0, 0, 0, room)).half().cpu().numpy().tobytes())
            masks.write(pad(mask, (0, room)).cpu().numpy().tobytes())
    return len(documents), LONGEST, DIM


def parts(folder: Path, shape: tuple[int, ...], part: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The mapped file, `part` documents at a time: nothing is read before it is scored."""
    tokens = torch.from_file(str(folder / "tokens.f16"), size=math.prod(shape), dtype=torch.float16)
    mask = torch.from_file(str(folder / "mask.bool"), size=math.prod(shape[:2]), dtype=torch.bool)
    yield from zip(tokens.view(shape).split(part), mask.view(shape[:2]).split(part), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, default=256, help="documents that are read at a time")
    part = parser.parse_args().part
    queries, documents = texts()
    encoder = LetterEncoder()
    with torch.no_grad():
        Q, q_mask = (x.to(device()) for x in padded(*encoder(queries)))
    Q = Q.half()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = write(folder, encoder, documents, part)
        size = (folder / "tokens.f16").stat().st_size
        print(f"{len(documents)} documents, {size / 1e6:.0f} MB on disk")

        count = math.ceil(len(documents) / part)
        first = TopK(Q, TOP, q_mask)
        for number, (D, d_mask) in enumerate(parts(folder, shape, part)):
            if number == count // 2:
                torch.save(first.state_dict(), folder / "search.pt")
                break
            first.add(D, d_mask)

        best = TopK(Q, TOP, q_mask)
        best.load_state_dict(torch.load(folder / "search.pt"))
        print(f"resumed after {best.seen} documents")
        for number, (D, d_mask) in enumerate(parts(folder, shape, part)):
            if number >= count // 2:
                best.add(D, d_mask)

        D, d_mask = (torch.cat(side) for side in zip(*parts(folder, shape, part), strict=True))
        scores, found = li.search(Q, D, TOP, q_mask=q_mask, d_mask=d_mask)
        if not (torch.equal(found, best.indices) and torch.equal(scores, best.scores)):
            raise SystemExit("the search in parts differs from the search in memory")
    print(f"the same {TOP} documents of each of {len(queries)} queries as in memory; MRR@10 {mrr(found):.4f}")


if __name__ == "__main__":
    main()
