"""Search the paragraphs of a folder's Markdown or text files, and say why the best one was found.

    python examples/search_texts.py docs/guide "delete a document"     # needs what `make demo` installs

The first run encodes the paragraphs with all-MiniLM-L6-v2, one vector a token, and keeps them in the folder
that --corpus names; a run that was stopped goes on where it was, and later ones search at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from letters import device
from torch import Tensor

import late_interaction as li

BATCH = 32


def paragraphs(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (file:line, text) of all paragraphs, in the order of their files."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".txt", ".rst")):
        line = 1
        for text in path.read_text(errors="replace").split("\n\n"):
            start = line + len(text) - len(text.lstrip("\n"))
            line += text.count("\n") + 2
            if text.strip():
                yield f"{path.relative_to(folder)}:{start}", text.strip()


def index(model: Any, folder: Path, texts: dict[str, str]) -> li.Corpus:
    """Encode what the folder of the corpus does not have yet, and open it."""
    names = list(texts)
    options: dict[str, Any] = {"codec": li.codecs.Int8(), "resume": True, "progress": True}
    try:
        return li.Corpus.open(folder)
    except (FileNotFoundError, li.corpus.CorpusError):  # not there, or not finished
        with li.Corpus.create(folder, d=384, total=len(names), shard_bytes=1 << 20, **options) as builder:
            for start in range(builder.documents, len(names), BATCH):
                batch = names[start : start + BATCH]
                tokens = model.encode_document([texts[name] for name in batch], convert_to_numpy=False)
                builder.add(tokens, ids=batch)
        return li.Corpus.open(folder)


def tokens_of(model: Any, text: str, task: str) -> tuple[Tensor, list[str]]:
    """Return the embeddings of a text's tokens, and what they read as."""
    found = model.encode(text, task=task, output_value=None)
    kept = found["attention_mask"].bool()
    return found["token_embeddings"][kept], model.tokenizer.convert_ids_to_tokens(found["input_ids"][kept])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the texts are")
    parser.add_argument("question")
    parser.add_argument("--corpus", type=Path, default=Path("corpus"), help="where their tokens are kept")
    parser.add_argument("-k", type=int, default=3)
    args = parser.parse_args()
    from demo.encode import Encoder  # its libraries take a while to import

    model, texts = Encoder(device()).model, dict(paragraphs(args.folder))
    corpus = index(model, args.corpus, texts)
    Q, words = tokens_of(model, args.question, "query")
    result = corpus.search(Q, args.k)
    for name, score in zip(result.ids, result.scores.tolist(), strict=True):
        print(f"{score:6.2f}  {name}  {' '.join(texts[name].split())[:70]}")
    document, document_words = tokens_of(model, texts[result.ids[0]], "document")
    print(li.explain(Q, document).text(words, document_words))


if __name__ == "__main__":
    main()
