"""A small BERT with random weights, and a tokenizer for the docstrings: for the examples of other libraries.

A checkpoint from the Hugging Face hub takes its place in earnest.
"""

from __future__ import annotations

import string
from collections import Counter

import torch
from letters import texts

WORDS = 4000  # of the vocabulary, the most frequent ones


def save_tiny_bert(folder: str, hidden: int = 64, longest: int = 64) -> None:
    """Writes model and tokenizer as `from_pretrained` reads them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import Lowercase
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
    characters = string.ascii_lowercase + string.digits
    split = BertPreTokenizer()
    counts = Counter(
        word for side in texts() for text in side for word, _ in split.pre_tokenize_str(text.lower())
    )
    frequent = [word for word, _ in counts.most_common(WORDS)]
    vocabulary = [*special, *characters, *(f"##{x}" for x in characters), *frequent]
    numbers = {word: i for i, word in enumerate(dict.fromkeys(vocabulary))}

    core = Tokenizer(WordPiece(numbers, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = Lowercase(), split
    ends = [("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])]
    core.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, mask_token="[MASK]", model_max_length=longest, **names
    )
    tokenizer.save_pretrained(folder)

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(numbers), hidden_size=hidden, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=2 * hidden, max_position_embeddings=longest,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
