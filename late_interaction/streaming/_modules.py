"""The modules of a layer that work on each token: its feed-forward network, and its norms."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable


def feed_forward(layer: nn.Module) -> nn.Module | None:
    """Return the feed-forward network of a layer, under the name that Transformers gives it."""
    found = getattr(layer, "mlp", None)
    return found if isinstance(found, nn.Module) and not hasattr(found, "router") else None


@contextmanager
def instead(module: nn.Module, forward: Any) -> Iterator[None]:
    """Let a module run another forward within."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def present_autocast(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return what enters the present state of autocast again."""
    on, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype, enabled=on)


def in_one(x: Tensor) -> Tensor:
    """Return all tokens as one sequence."""
    return x.reshape(1, -1, x.shape[-1])


def _token_chunks(x: Tensor, tokens: int) -> list[tuple[slice, slice]]:
    """Cut the tokens of one sequence."""
    return [(slice(None), slice(begin, begin + tokens)) for begin in range(0, x.shape[1], tokens)]


def in_chunks(layer: nn.Module, tokens: int, only_adds: bool) -> AbstractContextManager[None]:
    """Run the feed-forward network in the chunks that the backward takes, which draw the same numbers."""
    mlp = feed_forward(layer)
    if mlp is None or not only_adds:
        return nullcontext()
    own = mlp.forward

    def forward(x: Tensor) -> Tensor:
        chunks = _token_chunks(one := in_one(x), tokens)
        return own(x) if len(chunks) <= 1 else torch.cat([own(one[at]) for at in chunks], 1).view(x.shape)

    return instead(mlp, forward)


@contextmanager
def recomputed(
    layer: nn.Module, tokens: int, rest: int, only_adds: bool, autocast: Callable[[], Any]
) -> Iterator[None]:
    """Let the feed-forward network and the norms of a layer keep their input alone.

    They go through it in chunks of ``tokens``, and of ``rest``: chunks of a norm are soon over, and many of
    them keep the host from launching ahead.
    """
    with ExitStack() as stack:
        mlp = feed_forward(layer)
        if mlp is not None and only_adds:
            stack.enter_context(instead(mlp, again(mlp, mlp.forward, tokens, autocast, value=False)))
        for norm in layer.children():
            if is_norm(norm):
                stack.enter_context(instead(norm, again(norm, norm.forward, rest, autocast)))
        yield


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module normalizes each token."""
    return type(module).__name__.lower().endswith(("layernorm", "rmsnorm"))


def again(
    module: nn.Module, own: Any, tokens: int, autocast: Callable[[], Any] | None = None, *, value: bool = True
) -> Callable[..., Any]:
    """Return a forward of a module that keeps its input alone; without ``value`` it returns zeros.

    It is ``own`` for more arguments than an input. Without ``autocast`` the state at the call counts.
    """
    parameters = [*module.parameters()]

    def forward(*given: Any, **named: Any) -> Any:
        if len(given) != 1 or named:
            return own(*given, **named)
        within = autocast or present_autocast(given[0].device)
        return _Again.apply(own, within, tokens, value, *given, *parameters)  # type: ignore[no-untyped-call]

    return forward


class _Again(Function):
    """A module that works on each token, is computed again in the backward, and goes through it in chunks.

    The value of one whose output is only added can be left out.
    """

    @staticmethod
    def forward(
        ctx: Any, own: Any, autocast: Any, tokens: int, value: bool, x: Tensor, *parameters: Tensor
    ) -> Any:
        ctx.own, ctx.autocast, ctx.tokens = own, autocast, tokens
        ctx.value, ctx.parameters = value, parameters
        ctx.save_for_backward(x)
        return own(x) if value else x.new_zeros(()).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = map(in_one, ctx.saved_tensors)
        shape, grad, needed = grad.shape, in_one(grad), ctx.needs_input_grad[5:]
        wanted = [p for p, need in zip(ctx.parameters, needed, strict=True) if need]
        of_x = torch.empty_like(x)
        # A norm has few parameters, and may have very many chunks: their sum is rounded once.
        sums: list[Tensor | None] = [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) if ctx.value else None
            for p in wanted
        ]
        with torch.enable_grad():
            for at in _token_chunks(x, ctx.tokens):
                with ctx.autocast():
                    part = x[at].detach().requires_grad_()
                    out = ctx.own(part)
                add_gradients(out, grad[at], part, of_x, at, wanted, sums)
        found = (None if x is None else x.to(p.dtype) for x, p in zip(sums, wanted, strict=True))
        return None, None, None, None, of_x.view(shape), *(next(found) if need else None for need in needed)


def add_gradients(
    out: Tensor, grad: Tensor, part: Tensor, of_part: Tensor | None, at: Any, wanted: list[Tensor],
    sums: list[Tensor | None],
) -> None:  # fmt: skip
    """Write a chunk's gradient to ``of_part[at]``, and add those of the parameters to their sums."""
    leaves = [*wanted] if of_part is None else [part, *wanted]
    with without_hooks(wanted):
        found = [*torch.autograd.grad(out, leaves, grad.to(out.dtype), allow_unused=True)]
    if of_part is not None:
        own = found.pop(0)
        of_part[at] = 0 if own is None else own
    for i, gradient in enumerate(found):
        if gradient is not None:
            before = sums[i]
            sums[i] = gradient if before is None else before.add_(gradient)


@contextmanager
def without_hooks(weights: Sequence[Tensor]) -> Iterator[None]:
    """Leave the hooks of weights to the whole gradient: they would change that of each chunk, too."""
    hooked = [(x, x._backward_hooks) for x in weights if x._backward_hooks]
    for x, _ in hooked:
        x._backward_hooks = None
    try:
        yield
    finally:
        for x, hooks in hooked:
            x._backward_hooks = hooks


@contextmanager
def evaluated(layer: nn.Module) -> Iterator[None]:
    """Let all modules of a layer be in evaluation mode within."""
    modes = [(module, module.training) for module in layer.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
