"""Train a Transformers model on longer sequences: the backward of each layer goes through it in chunks.

As with gradient checkpointing a layer keeps its input alone, and is computed again in the backward. There a
layer as a whole needs several times the memory of its input for each token. In chunks it does not (StreamBP,
https://arxiv.org/abs/2506.03077): attention takes some sequences at a time, one at least, and the
feed-forward network some tokens. What remains is each layer's input.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from late_interaction._checks.messages import abbreviate
from late_interaction._torch import pytree
from late_interaction.losses._random_states import RandomStates
from late_interaction.streaming._modules import (
    add_gradients,
    again,
    evaluated,
    feed_forward,
    in_chunks,
    in_one,
    instead,
    is_norm,
    present_autocast,
    recomputed,
    without_hooks,
)

__all__ = ["stream_layers"]

_HOOK = "GradientCheckpointingLayer"  # the class of layers that hand on their call

# Where the feed-forward network has chunks of its own, the rest of a layer takes so many times their tokens:
# it keeps about a quarter of the bytes for each, and launches more kernels.
_REST = 4

# Arguments of layers that have the dim of sequences, and where it is, from the last dim on.
_DIMS = {"position_ids": -2, "position_embeddings": -3}


def stream_layers(model: nn.Module, *, tokens: int = 8192) -> int:
    """Have the layers of a Transformers model recompute and back-propagate their activations in chunks.

    It takes the place of ``model.gradient_checkpointing_enable()``, whose hook in each layer it uses, and
    ``model.gradient_checkpointing_disable()`` ends it. Gradients are those of the model without it, to
    rounding. Under autocast, with LoRA adapters and within DistributedDataParallel nothing else is to be
    done; embeddings may be frozen. Norms beside the layers, such as the last, stream too. Dropout draws the
    same numbers in both passes, but others than without chunks.

    Args:
        model: a decoder or an encoder of Transformers 5, or a PEFT model around one, with layers that support
            gradient checkpointing and take and return hidden states ``[batch, tokens, hidden]``. Layers of
            other shapes (packed images) and with arguments of unknown shapes are not cut by sequences.
            Attentions and a router's logits have no gradients here, and come in chunks: leave
            ``output_attentions`` and ``output_router_logits`` off. Weights that a layer uses must be its own
            modules': one that a hook brings along gets no gradient.
        tokens: about how many tokens a chunk has, above 0. Where the feed-forward network can be apart, these
            are its chunks, and the rest of a layer takes whole sequences of four times as many tokens
            together. Smaller chunks need less memory, and make a GPU's products smaller.

    Returns:
        How many layers stream.

    Raises:
        TypeError, ValueError: an argument of a wrong kind or value, or a model without such layers.

    Complexity: beside weights, their gradients and the input of each layer, the activations of a chunk in one
    layer; of a sequence that is longer, those of its attention. The forward runs twice, as with
    gradient checkpointing. The first step checks which layers only add their feed-forward network's output,
    which costs some more forwards, and backwards without that network.

    Example:
        >>> import late_interaction as li
        >>> from transformers import AutoModel                            # doctest: +SKIP
        >>> model = AutoModel.from_pretrained("Qwen/Qwen2-0.5B").train()  # doctest: +SKIP
        >>> li.stream_layers(model)                                       # doctest: +SKIP
        24
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {abbreviate(model)}")
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        raise TypeError(f"tokens must be an int, got {abbreviate(tokens)}")
    if tokens <= 0:
        raise ValueError(f"tokens must be above 0, got {tokens}")
    layers = [module for module in model.modules() if _HOOK in (x.__name__ for x in type(module).__mro__)]
    if not layers:
        raise ValueError(
            f"model must have layers that support gradient checkpointing (transformers' {_HOOK}), and"
            f" {type(model).__name__} has none"
        )
    run = _Run(tokens)
    for layer in layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, run  # type: ignore[assignment]
    for module in model.modules():
        if "gradient_checkpointing" in vars(module):  # the layers' model, which gives them no cache then
            module.gradient_checkpointing, module._gradient_checkpointing_func = True, run  # type: ignore[assignment]
        children = [*module.children()]
        lists = [x for x in children if isinstance(x, nn.ModuleList)]
        first = next((layer for x in lists for layer in x if layer in layers), None)
        if first is not None:
            for norm in filter(is_norm, children):
                norm.forward = _NormBesideLayers(norm, first)
    return len(layers)


class _NormBesideLayers:
    """Calls a norm beside the layers, such as the last, in chunks as long as they stream.

    It is an object, since copies of a model are to call their own norm.
    """

    def __init__(self, norm: nn.Module, layer: nn.Module) -> None:
        before = norm.__dict__.get("forward")
        if isinstance(before, _NormBesideLayers):
            before = before.before
        self.norm, self.layer = norm, layer
        self.before: Callable[..., Any] | None = before

    def __call__(self, *given: Any, **named: Any) -> Any:
        own = self.before or partial(type(self.norm).forward, self.norm)
        run = getattr(self.layer, "_gradient_checkpointing_func", None)
        on = self.layer.gradient_checkpointing and self.layer.training and torch.is_grad_enabled()
        streamed = again(self.norm, own, run.tokens) if on and isinstance(run, _Run) else own
        return streamed(*given, **named)


class _Run:
    """What layers call in place of ``torch.utils.checkpoint``."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.only_adds: dict[int, bool] = {}  # by the id of a layer

    def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        if not isinstance(function, partial):  # of a module that hands on something else than a layer
            return function(*given)
        # Before Transformers 5.24 the function is a method of the layer; since, the layer is its argument.
        layer: nn.Module = (*function.args, getattr(function.func, "__self__", None))[0]
        run, named, rest = partial(function.func, *function.args), function.keywords, given[1:]
        if given:
            hidden = given[0]
        else:  # hidden states come by name, before all others
            (name, hidden), *others = named.items()
            run, named = partial(_by_name, run, name), dict(others)
        call = _Call(layer, run, rest, named, self.tokens)
        if not torch.is_grad_enabled():
            return call.run(call.named, hidden)
        beside = call.detach()
        if id(layer) not in self.only_adds:
            self.only_adds[id(layer)] = _only_adds(call, hidden)
        call.only_adds = self.only_adds[id(layer)]
        return _Layer.apply(call, hidden, *beside, *layer.parameters())  # type: ignore[no-untyped-call]


class _Call:
    """A call of a layer: what it is given beside hidden states."""

    def __init__(
        self, layer: nn.Module, function: Any, rest: Sequence[Any], named: dict[str, Any], tokens: int
    ) -> None:
        self.layer, self.function, self.rest, self.named, self.tokens = layer, function, rest, named, tokens
        self.only_adds = False
        self.leaves: list[Tensor] = []  # of the arguments that have gradients

    def detach(self) -> list[Tensor]:
        """Put leaves in the place of arguments that have gradients, as an encoder's states; return these."""
        every = pytree.tree_leaves((self.rest, self.named))
        given = [x for x in every if isinstance(x, Tensor) and x.requires_grad]
        if given:
            self.leaves = [x.detach().requires_grad_() for x in given]
            leaf = {id(x): y for x, y in zip(given, self.leaves, strict=True)}
            self.rest, self.named = pytree.tree_map(lambda x: leaf.get(id(x), x), (self.rest, self.named))
        return given

    @property
    def at_once(self) -> int:
        """Count the tokens that the layer, but for its feed-forward network, takes together."""
        return self.tokens * (_REST if self.only_adds else 1)

    def run(self, named: dict[str, Any], hidden: Tensor) -> Any:
        return self.function(hidden, *self.rest, **named)

    def chunks(self, hidden: Tensor) -> Iterator[tuple[slice, Callable[[Tensor], Any]]]:
        """Yield some sequences at a time, and the layer with their part of the arguments."""
        batch = hidden.shape[0]
        each = max(1, self.at_once // max(hidden.shape[1], 1)) if self._splits(hidden) else max(batch, 1)
        for begin in range(0, batch, each):
            at = slice(begin, min(begin + each, batch))
            named = self.named
            if (at.start, at.stop) != (0, batch):
                named = {name: _cut(name, x, at, batch) for name, x in named.items()}
            yield at, partial(self.run, named)

    def _splits(self, hidden: Tensor) -> bool:
        """Tell whether the layer can take some sequences alone: it is known where its arguments have them."""
        batch = hidden.shape[0]
        given = [*self.named.items(), *(("", x) for x in self.rest)]
        return hidden.dim() == 3 and all(_is_known(name, x, batch) for name, x in given)


def _by_name(function: Any, name: str, hidden: Tensor, **named: Any) -> Any:
    return function(**{name: hidden}, **named)


def _is_known(name: str, x: Any, batch: int) -> bool:
    if isinstance(x, (tuple, list)):
        return all(_is_known(name, y, batch) for y in x)
    if not isinstance(x, Tensor):
        return x is None or isinstance(x, (bool, int, float, str))
    if name == "attention_mask":
        return x.dim() in (2, 4) and x.shape[0] in (1, batch)
    if name == "cache_position":
        return x.dim() == 1
    return name in _DIMS and x.dim() >= -_DIMS[name] and x.shape[_DIMS[name]] in (1, batch)


def _cut(name: str, x: Any, at: slice, batch: int) -> Any:
    if isinstance(x, (tuple, list)):
        return type(x)([_cut(name, y, at, batch) for y in x])
    dim = 0 if name == "attention_mask" else _DIMS.get(name)
    if not isinstance(x, Tensor) or dim is None or x.shape[dim] == 1 or batch == 1:
        return x
    return x.narrow(dim, at.start, at.stop - at.start)


# ---- a layer ----


class _Layer(Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: Tensor, *learned: Tensor) -> Tensor:
        ctx.call, ctx.autocast, ctx.random = call, present_autocast(hidden.device), RandomStates([])
        ctx.save_for_backward(hidden, *call.leaves, *learned[len(call.leaves) :])
        out: Tensor | None = None
        with in_chunks(call.layer, call.tokens, call.only_adds):
            for at, run in call.chunks(hidden):
                part = _states(run(hidden[at]), call.layer, hidden[at])
                if len(part) == len(hidden):
                    return part
                out = part.new_empty(hidden.shape[0], *part.shape[1:]) if out is None else out
                out[at] = part
        return hidden.clone() if out is None else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        hidden, *learned = ctx.saved_tensors
        wanted = [x for x, needed in zip(learned, ctx.needs_input_grad[2:], strict=True) if needed]
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[1] else None
        sums: list[Tensor | None] = [None] * len(wanted)
        again = recomputed(call.layer, call.tokens, call.at_once, call.only_adds, ctx.autocast)
        with ctx.random.again(), again, torch.enable_grad():
            for at, run in call.chunks(hidden):
                with ctx.autocast():
                    part = hidden[at].detach().requires_grad_(of_hidden is not None)
                    out = _states(run(part), call.layer, part)
                add_gradients(out, grad[at], part, of_hidden, at, wanted, sums)
        found = iter(sums)
        of_learned = (next(found) if needed else None for needed in ctx.needs_input_grad[2:])
        return None, of_hidden, *of_learned


def _states(out: Any, layer: nn.Module, hidden: Tensor) -> Tensor:
    if not isinstance(out, Tensor) or out.shape != hidden.shape:
        raise TypeError(
            f"stream_layers takes layers that return hidden states alone, and {type(layer).__name__} returns"
            f" {abbreviate(out)}"
        )
    return out


def _only_adds(call: _Call, hidden: Tensor) -> bool:
    """Tell whether a layer adds its feed-forward network's output to the rest, token by token, and no more.

    Only then can the backward leave its value out. The layer runs as in evaluation, with the output and with
    zeros.
    """
    mlp = feed_forward(call.layer)
    if mlp is None:
        return False
    own, seen = mlp.forward, list[Tensor]()

    def kept(*given: Any, **named: Any) -> Any:
        out = own(*given, **named)
        seen.extend(() if named else (*given, out))
        return out

    with torch.no_grad(), evaluated(call.layer):
        at, run = next(call.chunks(hidden))
        with instead(mlp, kept):
            out = run(hidden[at])
        if len(seen) != 2 or not isinstance(seen[1], Tensor) or seen[1].shape != seen[0].shape:
            return False
        with instead(mlp, lambda _: torch.zeros_like(seen[1])):
            rest = run(hidden[at])
        if not isinstance(out, Tensor) or not torch.equal(rest + seen[1], out):
            return False
        tokens, wanted = map(in_one, seen)
        half = tokens[:, : tokens.shape[1] // 2 + 1]
        part = wanted[:, : half.shape[1]]
        if not torch.allclose(own(half), part, rtol=0.02, atol=0.02 * float(part.abs().max())):
            return False
    return not _learns_from(call, hidden, mlp, seen[1])


def _learns_from(call: _Call, hidden: Tensor, mlp: nn.Module, value: Tensor) -> bool:
    """Tell whether the gradient of a weight beside the network depends on the network's value.

    That of a learned scale does, which may be 1 so far.
    """
    inner = {id(x) for x in mlp.parameters()}
    others = [x for x in call.layer.parameters() if x.requires_grad and id(x) not in inner]
    found = []
    with torch.enable_grad(), evaluated(call.layer), without_hooks(others):
        at, run = next(call.chunks(hidden))
        for x in (value, torch.zeros_like(value)):
            with instead(mlp, lambda _, x=x: x):
                out = run(hidden[at].detach())
            if not (others and out.requires_grad):
                return False
            found.append(torch.autograd.grad(out, others, value.view_as(out), allow_unused=True))
    pairs = [(x, y) for x, y in zip(*found, strict=True) if x is not None and y is not None]
    return not all(bool((x - y).norm() <= 0.02 * x.norm()) for x, y in pairs)
