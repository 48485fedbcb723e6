"""Writers that are killed, and readers beside a writer: `make crash` and tests/search/test_corpus_living.py.

`python -m tests.corpus_crash kill ROUNDS [SEED]`: ROUNDS times, a process that changes a corpus is killed
at a random moment. The folder opens then, and has what was acknowledged, and at most the call that was cut
off.
`python -m tests.corpus_crash read SECONDS`: three processes read a corpus while another one changes it.
"""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from late_interaction import Corpus
from late_interaction.corpus import _files, _generations, _shard_files

D = 4
# A process that is killed leaves what it has written, on any disk. This one is fast.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
Model = dict[str, int]  # the version of each document by its id, in their order


def document(name: str, version: int) -> torch.Tensor:
    """Tokens that say whose they are."""
    return torch.full((int(name) % 3 + 1, D), float((int(name) * 7 + version) % 1000))


def step(number: int, model: Model) -> tuple[str, list[str], Model]:
    """The call of this number: what it does, to which documents, and what there is then."""
    rng = random.Random(number)
    kind = rng.choice(["add", "add", "delete", "update", "compact"]) if model else "add"
    if kind == "add":
        names = [str(number * 10 + i) for i in range(rng.randint(1, 4))]
        return kind, names, model | dict.fromkeys(names, number)
    names = rng.sample(sorted(model), rng.randint(1, min(3, len(model)))) if kind != "compact" else []
    left = {name: version for name, version in model.items() if name not in names}
    return kind, names, left | dict.fromkeys(names, number) if kind == "update" else left


def call(corpus: Corpus, kind: str, names: list[str], number: int) -> None:
    if kind == "compact":
        corpus.compact()
    elif kind == "delete":
        corpus.delete(names)
    else:
        getattr(corpus, kind)([document(name, number) for name in names], names)


def holds(folder: Path, model: Model) -> bool:
    corpus = Corpus.open(folder, verify=True)
    if list(corpus.ids or ()) != list(model):
        return False
    query, count = torch.ones(1, D), max(len(model), 1)
    exact, rough = corpus.search(query, count), corpus.search(query, count, coarse="bits", candidates=count)
    if rough.ids != exact.ids or not torch.equal(rough.scores, exact.scores):
        return False
    return all(torch.equal(corpus[name], document(name, version)) for name, version in model.items())


def made(folder: Path) -> None:
    with Corpus.create(folder, d=D, dtype=torch.float32, shard_bytes=400) as builder:
        builder.add([], [])


def change(folder: Path, number: int, model: Model, pipe: int) -> None:
    """Make one call after the other, and acknowledge each, until somebody ends it."""
    corpus = Corpus.open(folder)
    while True:
        kind, names, model = step(number, model)
        call(corpus, kind, names, number)
        os.write(pipe, b".")
        if number % 3 == 0:  # which writes files, too
            corpus.search(torch.ones(1, D), 1, coarse="bits")
        number += 1


def forked(work, *args) -> int:
    child = os.fork()
    if child == 0:
        try:
            work(*args)
        except BaseException as error:
            print(f"{work.__name__}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def kill(rounds: int, seed: int = 0) -> None:
    rng, number, model = random.Random(seed), 0, Model()
    finished = cut = 0
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name) / "corpus"
        made(folder)
        for _ in range(rounds):
            mine, theirs = os.pipe()
            child = forked(change, folder, number, model, theirs)
            os.close(theirs)
            with os.fdopen(mine, "rb") as pipe:
                acknowledged = len(pipe.read(rng.randint(0, 4)))
                time.sleep(rng.uniform(0, 0.02))
                os.kill(child, signal.SIGKILL)
                acknowledged += len(pipe.read())
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"
            for _ in range(acknowledged):
                *_, model = step(number, model)
                number += 1
            finished += acknowledged
            if not holds(folder, model):
                *_, model = step(number, model)
                number, cut = number + 1, cut + 1
                assert holds(folder, model), f"call {number - 1} is half there"
            if len(model) > 40:
                model = dict(list(model.items())[-20:])
                corpus = Corpus.open(folder)
                corpus.delete([x for x in corpus.ids or () if x not in model])
            else:
                Corpus.open(folder).delete([])  # the next writer removes what nothing names
            entries = _files.read_metadata(folder / _files.METADATA)
            signs = {_shard_files.name_of(x["number"], "bits") for x in entries["shards"]}
            named = {*_generations.files_of(entries), _files.METADATA}
            assert named <= {x.name for x in folder.iterdir()} <= named | signs
    print(f"{rounds} kills, {finished} calls acknowledged and kept, {cut} more of those cut off")


def look(folder: Path, until: float, seed: int) -> None:
    """Each call of the writer is there in whole: versions are never mixed, pairs never parted."""
    rng, corpus, seen = random.Random(seed), Corpus.open(folder), 0
    while time.monotonic() < until:
        if rng.random() < 0.3:
            corpus = Corpus.open(folder, verify=False)
        else:
            corpus.refresh()
        ids, versions = list(corpus.ids or ()), {}
        for name, x in zip(ids, corpus[:], strict=True):
            assert len(x.unique()) <= 1, "tokens of several versions"
            versions[name] = float(x[0, 0])
        for name in ids:
            partner = name[:-1] + ("1" if name[-1] == "0" else "0")
            assert versions.get(partner) == versions[name], f"{name} without {partner}"
        scores, indices = corpus.search(torch.ones(1, D), 1)
        rough = corpus.search(torch.ones(1, D), 1, coarse="bits", candidates=max(len(ids), 1))
        assert torch.equal(rough.scores, scores) and torch.equal(rough.indices, indices)
        if ids:
            assert float(scores[0]) == D * max(versions.values()) and versions[ids[int(indices[0])]] > 0
        seen += 1
    assert seen > 3, seen
    print(f"reader {seed}: {seen} looks, the last at generation {corpus.generation}", flush=True)


def write_pairs(folder: Path, until: float) -> None:
    rng, corpus, number = random.Random(0), Corpus.open(folder), 0
    while time.monotonic() < until:
        number += 1
        here = sorted({x[:-1] for x in corpus.ids or ()})
        kind = rng.choice(["add", "add", "delete", "update", "compact"]) if here else "add"
        kind = "delete" if len(here) > 30 else kind
        pairs = [str(number)] if kind == "add" else rng.sample(here, min(2, len(here)))
        names = [f"{pair}{x}" for pair in pairs for x in "01"]
        docs = [torch.full((2, D), float(number)) for _ in names]
        if kind == "compact":
            corpus.compact()
        elif kind == "delete":
            corpus.delete(names)
        else:
            getattr(corpus, kind)(docs, names)
    print(f"writer: {number} calls", flush=True)


def read(seconds: float) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder, until = Path(name) / "corpus", time.monotonic() + seconds
        made(folder)
        children = [forked(look, folder, until, seed) for seed in range(10)]
        children.append(forked(write_pairs, folder, until))
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children), "a process failed"


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["LIK_SUPPRESS_NORM_WARN"] = "1"
    {"kill": lambda x, *seed: kill(int(x), *map(int, seed)), "read": lambda x: read(float(x))}[sys.argv[1]](
        *sys.argv[2:]
    )
