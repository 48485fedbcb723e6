"""The encoders of published late-interaction models, of their true sizes and with random weights, trained as
their authors train them. Nothing is downloaded: the sizes are those of the published config.json files.

- `modernbert`: GTE-ModernColBERT (lightonai/GTE-ModernColBERT-v1), ModernBERT-base and a projection without
  bias. All weights are trained.
- `colqwen2`: ColQwen2 (vidore/colqwen2-v1.0), Qwen2-VL-2B with patches of 14 x 14 pixels, four of them to an
  image token. Trained as colpali-engine trains it: LoRA by peft on the linear layers of the language model
  and on the projection, all else frozen in bfloat16, with gradient checkpointing. An A4 page within 768 image
  tokens has 896 x 644 pixels and 736 image tokens; with the prompt a document has 747 tokens.
- `modernvbert`: ColModernVBERT (ModernVBERT/colmodernvbert), ModernBERT-base and the vision tower of SigLIP2
  base: patches of 16 x 16 in tiles of 512 x 512, 16 of them to an image token. LoRA on the text model and on
  the projection, without checkpointing. An A4 page, 2048 pixels high, is cut into 4 x 3 tiles and one
  of the whole page: 832 image tokens, 876 with markers and prompt.

Weights that are trained are float32, and so is the state of their optimizer; on a GPU all passes run
under bfloat16 autocast. Attention is PyTorch's scaled_dot_product_attention. Token ids and pixels are
random; they are drawn on the device as they are encoded, so a large batch of pages need not be held.
"""

import importlib
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Inputs = dict[str, torch.Tensor]
Draw = Callable[[int, torch.Generator], Inputs]  # so many texts or pages
DIM = 128
LORA = {
    "r": 32, "lora_alpha": 32, "lora_dropout": 0.1, "init_lora_weights": "gaussian", "bias": "none",
    "task_type": "FEATURE_EXTRACTION",
}  # fmt: skip


def _dtype(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@dataclass
class Encoder:
    """Embeds queries and documents as unit rows."""

    module: torch.nn.Module  # from inputs to embeddings [texts, tokens, DIM]
    draw_queries: Draw
    draw_documents: Draw
    query: int  # tokens of one
    document: int
    device: torch.device

    @property
    def dtype(self):
        """The dtype of the embeddings, and of all products on a GPU."""
        return _dtype(self.device)

    def autocast(self):
        return torch.autocast("cuda", self.dtype) if self.device.type == "cuda" else nullcontext()

    def embed(self, count, seed):
        """The embeddings of `count` queries and of their documents, which are drawn anew from `seed`."""
        generator = torch.Generator(self.device).manual_seed(seed)
        queries = self.module(self.draw_queries(count, generator)).to(self.dtype)
        documents = self.module(self.draw_documents(count, generator)).to(self.dtype)
        return queries, documents

    def trained(self):
        return [x for x in self.module.parameters() if x.requires_grad]


@dataclass(frozen=True)
class Recipe:
    name: str
    title: str
    about: str  # the model and its training in a sentence
    part: int  # queries, with their documents, that GradCache encodes at a time
    weight: float  # its share of the time of a run
    packages: tuple[str, ...]  # that it needs
    build: Callable[[torch.device, bool, bool], Encoder]  # device; tiny sizes; LoRA where the recipe has it
    is_text: bool = False


# ---- inputs ----


def _ids(count, length, most, generator):
    """Random ids below `most`, without the first ones, which may be special."""
    return torch.randint(3, most, (count, length), generator=generator, device=generator.device)


def _text(length, most):
    def draw(count, generator):
        ids = _ids(count, length, most, generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return draw


def _pages(length, most, image, image_id, pixels):
    """Pages of `length` tokens, of which those at `image` are image tokens."""

    def draw(count, generator):
        ids = _ids(count, length, most, generator)
        ids[:, image.to(ids.device)] = image_id
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels(count, generator)}

    return draw


def _random(shape, generator):
    device = generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=_dtype(device))


# ---- models ----


class _TextModule(torch.nn.Module):
    def __init__(self, model, width):
        super().__init__()
        self.model = model
        self.dense = torch.nn.Linear(width, DIM, bias=False)

    def forward(self, inputs):
        return F.normalize(self.dense(self.model(**inputs).last_hidden_state), dim=-1)


class _PageModule(torch.nn.Module):
    def __init__(self, model, **options):
        super().__init__()
        self.model = model
        self.options = options

    def forward(self, inputs):
        return self.model(**inputs, **self.options).embeddings


@contextmanager
def _made(device, dtype):
    """Weights that are made within are initialized on the device, in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _with_lora(model, modules):
    """The model with adapters on the modules whose whole name matches; they alone are trained, in float32."""
    peft = importlib.import_module("peft")
    return peft.get_peft_model(model, peft.LoraConfig(**LORA, target_modules=modules))


def _checkpoint(model):
    """Layers keep their inputs alone and run again in the backward. Transformers has renamed the call."""
    renamed = getattr(model, "activation_checkpointing_enable", None)
    (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _modernbert_config(tiny, vocabulary):
    config = importlib.import_module("transformers").ModernBertConfig
    if tiny:
        return config(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=2, local_attention=8, pad_token_id=0, bos_token_id=1, cls_token_id=1,
            eos_token_id=2, sep_token_id=2,
        )  # fmt: skip
    return config(
        vocab_size=vocabulary, hidden_size=768, intermediate_size=1152, num_hidden_layers=22,
        num_attention_heads=12, local_attention=128,
    )  # fmt: skip


def _modernbert(device, tiny, lora):
    transformers = importlib.import_module("transformers")
    config = _modernbert_config(tiny, 64 if tiny else 50_368)
    with _made(device, torch.float32):
        module = _TextModule(transformers.ModernBertModel(config), config.hidden_size)
    query, document = (6, 20) if tiny else (32, 300)
    most = 64 if tiny else 50_000  # special tokens come after
    return Encoder(module.train(), _text(query, most), _text(document, most), query, document, device)


def _qwen2_vl_config(tiny):
    transformers = importlib.import_module("transformers")
    if tiny:
        text = {
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": _mrope([2, 3, 3]),
            "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
        special = {"image_token_id": 63, "video_token_id": 62, "vision_start_token_id": 61}
        return transformers.Qwen2VLConfig(
            text_config=text, vision_config=vision, vision_end_token_id=60, **special
        )
    text = {
        "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_window_layers": 28,
        "max_position_embeddings": 32_768, "rope_parameters": _mrope([16, 24, 24]),
    }  # fmt: skip
    vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "mlp_ratio": 4}
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)


def _mrope(sections):
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}


def _colqwen2(device, tiny, lora):
    transformers = importlib.import_module("transformers")
    vlm = _qwen2_vl_config(tiny)
    config = transformers.ColQwen2Config(vlm_config=vlm, embedding_dim=DIM)
    with _made(device, _dtype(device)):
        model = transformers.ColQwen2ForRetrieval(config)
    model.vlm.visual.requires_grad_(False)
    _checkpoint(model.vlm)
    if lora:
        linear = "down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj"
        model = _with_lora(model, f".*language_model.*({linear})|.*embedding_proj_layer")
    rows, columns = (4, 6) if tiny else (64, 46)  # patches of a page; four of them make a token
    tokens, before, after = rows * columns // 4, 4, 7  # the prompt before and after the image
    # A patch as the image processor hands it over: 3 channels of two equal frames of 14 x 14 pixels.
    patch = 3 * 2 * 14 * 14

    def pixels(count, generator):
        grid = torch.tensor([[1, rows, columns]], device=generator.device).expand(count, 3)
        values = _random((count, rows * columns, patch), generator)
        return {"pixel_values": values, "image_grid_thw": grid}

    most = 60 if tiny else 150_000
    query, document = (5 if tiny else 24), before + tokens + after
    image = torch.arange(before, before + tokens)
    pages = _pages(document, most, image, vlm.image_token_id, pixels)
    module = _PageModule(model, use_cache=False)
    return Encoder(module.train(), _text(query, most), pages, query, document, device)


def _modernvbert(device, tiny, lora):
    transformers = importlib.import_module("transformers")
    side, tiles = (32, 2) if tiny else (512, 13)
    vision = {"image_size": side, "patch_size": 8 if tiny else 16}
    sizes = (32, 48, 2, 2) if tiny else (768, 3072, 12, 12)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vision |= dict(zip(names, sizes, strict=True))
    vocabulary = 64 if tiny else 50_408
    vlm = transformers.ModernVBertConfig(
        text_config=_modernbert_config(tiny, vocabulary).to_dict(), vision_config=vision,
        pixel_shuffle_factor=4, image_token_id=vocabulary - 1,
    )  # fmt: skip
    config = transformers.ColModernVBertConfig(vlm_config=vlm, embedding_dim=DIM)
    with _made(device, _dtype(device)):
        model = transformers.ColModernVBertForRetrieval(config)
    model.vlm.vision_model.requires_grad_(False)
    if lora:
        model = _with_lora(model, ".*text_model.*(Wo|Wqkv|Wi)|.*embedding_proj_layer")

    def pixels(count, generator):
        return {"pixel_values": _random((count, tiles, 3, side, side), generator)}

    # Two markers go before the image tokens of each tile, and the rest of the prompt after all of them.
    each = (side // vision["patch_size"] // 4) ** 2
    image = torch.cat([torch.arange(each) + 2 + i * (each + 2) for i in range(tiles)])
    most = 60 if tiny else 50_000
    query, document = (5 if tiny else 24), tiles * (each + 2) + (5 if tiny else 18)
    pages = _pages(document, most, image, vocabulary - 1, pixels)
    return Encoder(_PageModule(model).train(), _text(query, most), pages, query, document, device)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "modernbert", "GTE-ModernColBERT",
            "ModernBERT-base, all weights trained", 128, 1.2, ("transformers",), _modernbert, is_text=True,
        ),
        Recipe(
            "colqwen2", "ColQwen2",
            "Qwen2-VL-2B, LoRA on the language model, gradient checkpointing", 32, 1.0,
            ("transformers", "peft"), _colqwen2,
        ),
        Recipe(
            "modernvbert", "ColModernVBERT",
            "ModernBERT-base and SigLIP2 base, LoRA on the text model", 32, 0.8,
            ("transformers", "peft"), _modernvbert,
        ),
    )
}  # fmt: skip
