"""Index folders as ColBERT 0.2.22, fast-plaid 1.7.0 and PyLate leave them, by their formats' definitions."""

import json
import pickle
import sqlite3
from itertools import product

import numpy as np
import torch

D = 16
FORMATS = ("colbert", "chunks", "merged", "staged")


def unit(x):
    return torch.nn.functional.normalize(x, dim=-1)


class Index:
    """Documents as an index compresses them, in chunks of so many documents."""

    def __init__(self, lengths, nbits, d=D, chunk=4):
        tokens = unit(torch.randn(sum(lengths), d))
        self.nbits, self.lengths = nbits, [lengths[i : i + chunk] for i in range(0, len(lengths), chunk)]
        self.centroids = unit(torch.randn(20, d)).half()
        self.codes = (tokens @ self.centroids.float().T).argmax(-1)
        rest = tokens - self.centroids.float()[self.codes]
        quantiles = torch.arange(2**nbits) / 2**nbits
        self.cutoffs = rest.flatten().quantile(quantiles[1:]).half().float()
        self.weights = rest.flatten().quantile(quantiles + 0.5 / 2**nbits).half().float()
        buckets = torch.bucketize(rest, self.cutoffs).unsqueeze(-1)
        bits = (buckets >> torch.arange(nbits)) & 1  # of each bucket the lowest bit first, into the highest
        self.residuals = torch.from_numpy(np.packbits(bits.flatten().numpy())).view(len(tokens), -1)

    def chunks(self):
        """Each chunk's lengths, codes and residuals."""
        sizes = [sum(x) for x in self.lengths]
        return list(zip(self.lengths, self.codes.split(sizes), self.residuals.split(sizes), strict=True))

    def tokens(self):
        """Decompress as ColBERT does: its tables, the sum in float32, divided by its norm."""
        reversed_bits = []
        for byte in range(256):
            text = f"{byte:08b}"
            groups = [text[i : i + self.nbits][::-1] for i in range(0, 8, self.nbits)]
            reversed_bits.append(int("".join(groups), 2))
        lookup = torch.tensor(list(product(range(2**self.nbits), repeat=8 // self.nbits)))
        buckets = lookup[torch.tensor(reversed_bits)[self.residuals.long()]].flatten(1)
        tokens = unit(self.centroids.float()[self.codes] + self.weights[buckets])
        return tokens.split([n for chunk in self.lengths for n in chunk])

    def scores(self, Q):
        """Sums of maxima [Nq, documents]; -inf of documents without a token."""
        found = [(Q.cpu().float() @ x.T).amax(-1).sum(-1) if len(x) else None for x in self.tokens()]
        none = torch.full((len(Q),), -torch.inf)
        return torch.stack([none if x is None else x for x in found], dim=1)

    def write(self, folder, form):
        folder.mkdir(parents=True, exist_ok=True)
        for i, (lengths, _, _) in enumerate(self.chunks()):
            (folder / f"doclens.{i}.json").write_text(json.dumps(lengths))
        {"colbert": self._write_colbert}.get(form, self._write_fast_plaid)(folder, form)
        return folder

    def _write_colbert(self, folder, _):
        config = {"dim": self.centroids.shape[1], "nbits": self.nbits, "root": "experiments"}
        plan = {"config": config, "num_chunks": len(self.lengths), "num_partitions": 20}
        (folder / "plan.json").write_text(json.dumps(plan, indent=4))
        metadata = plan | {"num_embeddings": len(self.codes), "avg_doclen": 7.5}
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=4))
        torch.save(self.centroids, folder / "centroids.pt")
        torch.save((self.cutoffs, self.weights), folder / "buckets.pt")
        torch.save(torch.tensor([0.03]), folder / "avg_residual.pt")
        torch.save((torch.arange(20), torch.ones(20, dtype=torch.int64)), folder / "ivf.pid.pt")
        passages = tokens = 0
        for i, (lengths, codes, residuals) in enumerate(self.chunks()):
            torch.save(codes.int(), folder / f"{i}.codes.pt")
            torch.save(residuals.clone(), folder / f"{i}.residuals.pt")
            own = {"passage_offset": passages, "num_passages": len(lengths), "num_embeddings": len(codes)}
            (folder / f"{i}.metadata.json").write_text(json.dumps(own | {"embedding_offset": tokens}))
            passages, tokens = passages + len(lengths), tokens + len(codes)

    def _write_fast_plaid(self, folder, form):
        """chunks: as it writes them; merged: as they are once it loaded them; staged: the last is new."""
        count, documents = len(self.lengths), sum(map(len, self.lengths))
        (folder / "plan.json").write_text(json.dumps({"nbits": self.nbits, "num_chunks": count}))
        metadata = {"num_chunks": count, "nbits": self.nbits, "num_partitions": 20}
        metadata |= {"num_embeddings": len(self.codes), "num_documents": documents, "avg_doclen": 7.5}
        metadata |= {} if form == "chunks" else {"frozen": True, "mutable": True}
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2))
        tables = {"centroids": self.centroids, "bucket_cutoffs": self.cutoffs, "bucket_weights": self.weights}
        tables |= {"avg_residual": torch.rand(self.centroids.shape[1]), "cluster_threshold": torch.rand(1)}
        for name, x in tables.items():
            write_npy(folder / f"{name}.npy", x)
        new = {"chunks": range(count), "merged": (), "staged": (count - 1,)}[form]
        parts = {name: [x[1 + i] for x in self.chunks()] for i, name in enumerate(("codes", "residuals"))}
        for name, own in parts.items():
            for i in new:
                write_npy(folder / f"{i}.{name}.npy", own[i])
            if form == "chunks":
                continue
            own = [torch.zeros_like(own[i][: len(own[i]) // 2]) if i in new else own[i] for i in range(count)]
            rows = {f"{i}.{name}.npy": {"rows": len(x), "merged": True} for i, x in enumerate(own)}
            (folder / f"merged_{name}.manifest.json").write_text(json.dumps(rows))
            padding = own[0].new_zeros(5, *own[0].shape[1:])
            write_npy(folder / f"merged_{name}.npy", torch.cat([*own, padding]), 192)


def write_npy(path, x, length=None):
    """Write as tch does: a shape with a comma behind it, and a prologue of a multiple of 16 bytes."""
    array = x.contiguous().numpy()
    text = f"{{'descr': '<{array.dtype.str[1:]}', 'fortran_order': False, 'shape': "
    text += f"({','.join(map(str, array.shape))},), }}"
    size = length or -(-(len(text) + 11) // 16) * 16
    header = (text + " " * (size - 11 - len(text)) + "\n").encode()
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + array.tobytes())


def write_ids(folder, ids, sqlite=False):
    """Write PyLate's map of numbers to ids: a pickle, or the database of older releases."""
    if not sqlite:
        (folder / "plaid_ids_to_documents_ids.pkl").write_bytes(pickle.dumps(ids))
        return
    with sqlite3.connect(folder / "plaid_ids_to_documents_ids.sqlite") as connection:
        connection.execute("CREATE TABLE unnamed (key TEXT PRIMARY KEY, value BLOB)")
        rows = [(key, sqlite3.Binary(pickle.dumps(x))) for key, x in ids.items()]
        connection.executemany("INSERT INTO unnamed VALUES (?, ?)", rows)
    connection.close()
