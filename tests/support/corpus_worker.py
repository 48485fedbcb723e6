"""Processes of tests/search/test_corpus.py and tests/search/test_corpus_files.py.

`python -m tests.support.corpus_worker search FOLDER`: searches corpora in chunks in a process that may
take little memory, and shows that a search without chunks is refused it.
`python -m tests.support.corpus_worker build FOLDER`: builds a corpus, and kills itself within a shard.
"""

import os
import resource
import signal
import sys
from pathlib import Path

import torch

from late_interaction import Corpus
from late_interaction.codecs import Int8

CORPUS, MORE, CHUNK = 48 << 20, 36 << 20, 1 << 20


def documents(count: int, d: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5 + i % 50, d, generator=generator) for i in range(count)]


def private_bytes() -> int:
    """Private memory of this process, mapped files among it."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmData")]
    return int(line.split()[1]) * 1024


def search(folder: Path) -> None:
    torch.set_num_threads(1)
    docs, Q = 2 * torch.randn(500, 128).sign(), torch.randn(1, 8, 128)
    corpora = []
    for how in ({"dtype": torch.float16}, {"codec": Int8()}):
        path, width = folder / str(len(corpora)), 1 if "codec" in how else 2
        with Corpus.create(path, d=128, **how, normalize="codec" in how) as builder:
            builder.add([docs] * (CORPUS // (128 * width * len(docs))))
        corpora.append(Corpus.open(path))
        corpora[-1].search(Q, 3, normalize=True, chunk_bytes=CHUNK)
    limit = private_bytes() + MORE
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for corpus in corpora:
        corpus.search(Q, 3, normalize=True, chunk_bytes=CHUNK)
    try:
        corpora[0].search(Q, 3, normalize=True, chunk_bytes=1 << 30)  # normalizes a copy of the corpus
    except RuntimeError as error:
        assert "allocate" in str(error), error
    else:
        raise AssertionError("the limit refuses nothing")
    print("float16 and int8 in bounded memory, float16 without chunks refused it")


def build(folder: Path) -> None:
    docs = documents(100)
    with Corpus.create(folder, d=16, codec=Int8(), normalize=True, shard_bytes=4000) as builder:
        for i in range(0, 80, 4):
            builder.add(docs[i : i + 4], [str(j) for j in range(i, i + 4)])
        print(builder.documents, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]))
    else:
        search(Path(sys.argv[2]))
