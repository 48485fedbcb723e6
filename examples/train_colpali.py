"""From a dataset with hard negatives to a ColPali model, by colpali-engine's trainer on these kernels.

    python examples/train_colpali.py                       # needs colpali-engine and datasets

The pages are grids of 4 x 4 squares, two of them coloured; a query names two colours, and each of its
negatives has one of the two. The model is a ColPali with random weights, small enough for a CPU. A batch of
any size is exact: `cached_contrastive_step` encodes it in parts, since colpali-engine has no cached loss of
its own, and the patch scores it without storing a similarity.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import combinations
from random import Random
from typing import Any

import torch
from colpali_engine.collators import VisualRetrieverCollator
from colpali_engine.data.dataset import ColPaliEngineDataset
from colpali_engine.loss.late_interaction_losses import ColbertNegativeCELoss
from colpali_engine.models.paligemma import ColPali, ColPaliProcessor
from colpali_engine.trainer import ContrastiveTrainer
from letters import device, mrr
from PIL import Image
from torch import Tensor
from transformers import TrainingArguments

import late_interaction as li

COLOURS = {
    "red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0),
    "cyan": (0, 255, 255), "magenta": (255, 0, 255), "white": (255, 255, 255), "black": (0, 0, 0),
}  # fmt: skip
SQUARE, GRID, NEGATIVES = 8, 4, 2
PAIRS = list(combinations(COLOURS, 2))


class CachedTrainer(ContrastiveTrainer):
    """Encodes a batch in parts, and hands the loss all of it."""

    mini_batch_size = 16  # what fits the GPU

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        starts = range(0, len(inputs["query_input_ids"]), self.mini_batch_size)
        parts = [{key: x[i : i + self.mini_batch_size] for key, x in inputs.items()} for i in starts]

        def encode(part: dict[str, Tensor]) -> tuple[Tensor, ...]:
            def side(prefix: str) -> dict[str, Tensor]:
                return {key.removeprefix(prefix): x for key, x in part.items() if key.startswith(prefix)}

            with self.compute_loss_context_manager():
                negatives = model(**self._reshape_neg_doc_inputs(part))
                count = part["neg_doc_input_ids"].shape[1]
                return model(**side("query_")), model(**side("doc_")), negatives.unflatten(0, (-1, count))

        return li.cached_contrastive_step(encode, parts, self.loss_func, module=model)


def page(colours: tuple[str, ...], random: Random) -> Image.Image:
    image = Image.new("RGB", (GRID * SQUARE, GRID * SQUARE), (128, 128, 128))
    for colour, place in zip(colours, random.sample(range(GRID * GRID), len(colours)), strict=True):
        corner = place % GRID * SQUARE, place // GRID * SQUARE
        image.paste(COLOURS[colour], (*corner, corner[0] + SQUARE, corner[1] + SQUARE))
    return image


def rows(count: int, random: Random) -> list[dict[str, Any]]:
    """Queries with their page, and pages that hold one of their colours."""
    found = []
    for pair in random.choices(PAIRS, k=count):
        others = [x for x in PAIRS if len({*x} & {*pair}) == 1]
        negatives = [page(x, random) for x in random.sample(others, NEGATIVES)]
        found.append({"query": " ".join(pair), "page": page(pair, random), "negatives": negatives})
    return found


def tiny_colpali() -> tuple[ColPali, ColPaliProcessor]:
    """In earnest both come from a checkpoint: `from_pretrained("vidore/colpaligemma-3b-pt-448-base")`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PaliGemmaConfig, PreTrainedTokenizerFast, SiglipImageProcessor

    names = ["<pad>", "<unk>", "<bos>", "<eos>", "<image>", "Describe", "the", "image", ".", *COLOURS]
    core = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    width = GRID * SQUARE
    images = SiglipImageProcessor(size={"height": width, "width": width})
    images.image_seq_length = GRID * GRID
    processor = ColPaliProcessor(image_processor=images, tokenizer=tokenizer)

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = PaliGemmaConfig(
        vision_config={
            "model_type": "siglip_vision_model", "image_size": width, "patch_size": SQUARE,
            "projection_dim": 64, **sizes,
        },
        text_config={
            "model_type": "gemma", "vocab_size": len(tokenizer), "num_key_value_heads": 1,
            "head_dim": 32, **sizes,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), projection_dim=64, hidden_size=64,
    )  # fmt: skip
    return ColPali(config), processor


@torch.no_grad()
def quality(model: ColPali, processor: ColPaliProcessor) -> float:
    """MRR of each query's page, by the processor's own scores: colpali-engine has no other evaluator."""
    model.eval().to(device())
    pages = [page(pair, Random(1)) for pair in PAIRS]
    Q = model(**processor.process_queries([" ".join(pair) for pair in PAIRS]).to(device()))
    D = model(**processor.process_images(pages).to(device()))
    return mrr(processor.score(list(Q), list(D)).topk(10).indices)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        li.patch("colpali-engine")  # before the loss is built
        model, processor = tiny_colpali()
        before = quality(model, processor)

        train = ColPaliEngineDataset(
            rows(400, Random(0)), pos_target_column_name="page", neg_target_column_name="negatives"
        )
        args = TrainingArguments(
            output_dir=f"{folder}/run",
            per_device_train_batch_size=options.batch,  # all of it are negatives
            max_steps=options.steps,
            learning_rate=3e-3,  # of random weights; 5e-5 for LoRA of a checkpoint
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        loss = ColbertNegativeCELoss(temperature=1.0, normalize_scores=False, in_batch_term_weight=0.5)
        trainer = CachedTrainer(
            model=model,
            args=args,
            train_dataset=train,
            eval_dataset=None,
            data_collator=VisualRetrieverCollator(processor),
            loss_func=loss,
            is_vision_model=True,
        )
        trainer.train()

        model.save_pretrained(f"{folder}/trained")
        processor.save_pretrained(f"{folder}/trained")
        trained = ColPali.from_pretrained(f"{folder}/trained")
        trained.model.tie_weights()  # the language model's head, which is not saved
        after = quality(trained, ColPaliProcessor.from_pretrained(f"{folder}/trained"))
    print(f"calls on these kernels: {li.patched()['colpali-engine'].served}")
    print(f"held-out MRR@10: {before:.4f} before, {after:.4f} after")


if __name__ == "__main__":
    main()
