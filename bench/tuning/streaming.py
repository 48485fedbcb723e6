"""Memory and time of training steps of Qwen2-VL-2B's language model: a checkpoint a layer, and stream_layers.

    python -m bench stream-layers --out bench/results/stream-layers-<device>.txt

28 layers of 1536, 12 heads and 2 key-value heads, feed-forward 8960, random weights: all of them trained in
bfloat16, and frozen ones with LoRA of rank 32 under autocast. A step is the forward of given embeddings of
tokens, `losses.contrastive` with short queries, and the backward: of pages of 747 tokens, as ColQwen2 has, or
of one long text. Two sizes give the bytes of a token and what else a step takes, and so how many tokens
--budget holds beside the weights and their gradients. The bound is what the shapes allow: bytes of a token
with checkpoints alone, over those that stay (each layer's input, two gradients of hidden states, a layer's
keys and values and their gradients).
"""

from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.functional import normalize

import late_interaction as li
from bench.harness.run_header import add_table_arguments, keep_text, listed, table
from late_interaction._doctor.text import error_text
from late_interaction._doctor.timing import wall_seconds

LAYERS, HIDDEN, HEADS, KEYS, FORWARD, PAGE, QUERY, DIM = 28, 1536, 12, 2, 8960, 747, 24, 128
SIZES = {
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "intermediate_size": FORWARD,
}  # fmt: skip
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 96}
CHECKPOINTS, STREAMED = "checkpoints", "stream_layers"
LORA = {"r": 32, "lora_alpha": 32, "lora_dropout": 0.1, "target_modules": "all-linear"}


class Trained:
    """A model with trained weights, all or adapters."""

    def __init__(self, lora, device):
        from transformers import Qwen2Config, Qwen2Model

        on_gpu = device.type == "cuda"
        config = Qwen2Config(
            vocab_size=1024, num_key_value_heads=KEYS, max_position_embeddings=1 << 20, use_cache=False,
            attn_implementation="sdpa", **(SIZES if on_gpu else TINY),
        )  # fmt: skip
        torch.manual_seed(0)
        self.lora, self.device, self.dtype = lora, device, torch.bfloat16 if on_gpu else torch.float32
        with device:
            self.model = self.base = Qwen2Model(config).to(self.dtype)
        if lora:
            import peft

            self.model = peft.get_peft_model(self.base, peft.LoraConfig(**LORA))
            for x in self.model.parameters():
                x.data = x.data.float() if x.requires_grad else x.data
        self.model.train()

    def use(self, way, tokens):
        if way == STREAMED:
            li.stream_layers(self.model, tokens=tokens)
        else:
            self.base.gradient_checkpointing_enable({"use_reentrant": False})

    def step(self, batch, length):
        hidden = self.base.config.hidden_size
        x = torch.randn(batch, length, hidden, device=self.device).to(self.dtype).requires_grad_()
        head = torch.randn(hidden, DIM, device=self.device, dtype=self.dtype) / hidden**0.5
        Q = normalize(torch.randn(batch, QUERY, DIM, device=self.device), dim=-1).to(self.dtype)
        half = torch.autocast(self.device.type, torch.bfloat16) if self.lora else nullcontext()
        with half:
            states = self.model(inputs_embeds=x).last_hidden_state
        D = normalize(states.to(self.dtype) @ head, dim=-1)
        loss = li.losses.contrastive(Q, D, temperature=1.0) if batch > 1 else li.maxsim(Q, D).mean()
        loss.backward()

    def measure(self, batch, length, rounds):
        """The peak beside weights and gradients and these, in bytes, and seconds of the fastest step."""
        self.step(batch, length)  # makes the gradients, which stay, and warms up
        before = _bytes(self.device)
        times = [wall_seconds(partial(self.step, batch, length), self.device) for _ in range(rounds)]
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else before
        self.model.zero_grad()
        return peak - before, before, min(times)


def _bytes(device):
    """Return what is allocated, and begin a new peak from there."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return float(torch.cuda.memory_allocated())


def rows(args, device):
    for lora in (False, True):
        name = "LoRA" if lora else "all weights"
        try:
            trained = Trained(lora, device)
        except ImportError as error:
            yield {"trained": name, "of": f"{error}"}
            continue
        for kind, sizes in (("pages", args.pages), ("text", args.texts)):
            row = {"trained": name, "of": kind}
            try:
                yield row | compared(trained, kind, sizes, args)
            except Exception as error:  # of one kind, which must not end the others
                yield row | {"bytes a token": error_text(error)[:60]}
        del trained


def compared(trained, kind, sizes, args):
    each, within, took = [], [], []  # by checkpoints, and streamed
    for way in (CHECKPOINTS, STREAMED):
        trained.use(way, args.tokens)
        shapes = [(size, PAGE) if kind == "pages" else (1, size) for size in sizes]
        found = [trained.measure(*shape, args.rounds) for shape in shapes]
        (few, many), ((low, base, _), (high, _, seconds)) = [n * length for n, length in shapes], found
        each.append((high - low) / (many - few))
        within.append((args.budget * 2**30 - base - (low - each[-1] * few)) / max(each[-1], 1e-9))
        took.append(seconds)
    stays = 2 * HIDDEN * LAYERS + 2 * 2 * HIDDEN + 4 * 2 * KEYS * (HIDDEN // HEADS)
    fits = f"tokens in {args.budget:g} GiB"
    return {
        "bytes a token": f"{each[0]:,.0f}", "bytes a token, streamed": f"{each[1]:,.0f}",
        fits: f"{within[0]:,.0f}", f"{fits}, streamed": f"{within[1]:,.0f}",
        "gain, of the bound": f"{within[1] / within[0]:.2f}x of {each[0] / stays:.2f}x",
        "ms a step, of the larger": f"{1e3 * took[0]:,.0f} / {1e3 * took[1]:,.0f}",
        "time": f"{took[1] / took[0]:.2f}x",
    }  # fmt: skip


def add_arguments(p):
    p.add_argument("--budget", type=float, default=40.0, help="GiB, weights and gradients included")
    p.add_argument("--pages", type=listed(int), default="48,96", help=f"pages of {PAGE} tokens: two batches")
    p.add_argument("--texts", type=listed(int), default="8192,16384", help="two lengths of one text")
    add_table_arguments(p, tokens=8192, rounds=2)  # tokens of a chunk


def run(args):
    title = f"Qwen2-VL-2B's language model, chunks of {args.tokens:,} tokens"
    keep_text(f"{title}\n{table(list(rows(args, torch.device(args.device))), left=2)}", args)
    return 0
