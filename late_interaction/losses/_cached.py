"""Encoding in parts with cached gradients, GradCache: https://arxiv.org/abs/2101.06983.

Distributed modules under an encoder that runs in parts each send their gradients with their last part.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction.losses._random_states import RandomStates, accesses_of

_swapping = threading.Lock()
_noting: dict[int, list[Any]] = {}  # by thread: modules in DistributedDataParallel that have run
_notify: Callable[[Any], Any]


class Senders:
    """The distributed modules that an encoder runs, and the last part that each of them runs in."""

    def __init__(self, module: Any, parts: int) -> None:
        self._last: dict[Any, int] = {}
        module = getattr(module, "_orig_mod", module)  # of torch.compile
        if hasattr(module, "set_requires_gradient_sync") or hasattr(module, "no_sync"):
            self._last[module] = parts - 1

    @contextmanager
    def noted(self, part: int) -> Iterator[None]:
        """Note every module in DistributedDataParallel whose forward this thread runs within."""
        if not (dist.is_available() and dist.is_initialized()):
            yield
            return
        found: list[Any] = []
        with _noted_forwards(found):
            yield
        if any(module.static_graph for module in found):
            raise ValueError(
                "encoder must not run a module in DistributedDataParallel(static_graph=True), which cannot"
                " hold gradients back in its first step: make it with static_graph=False"
            )
        self._last |= dict.fromkeys(found, part)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Keep modules in DistributedDataParallel from sending what a backward within leaves."""
        with ExitStack() as stack:
            for module in self._last:
                if not hasattr(module, "set_requires_gradient_sync"):
                    stack.enter_context(module.no_sync())
            yield

    @contextmanager
    def part(self, part: int) -> Iterator[None]:
        """Let modules send the gradients of the backward within if this is their last part."""
        with ExitStack() as stack:
            for module, last in self._last.items():
                if hasattr(module, "set_requires_gradient_sync"):  # FSDP2
                    module.set_requires_gradient_sync(part == last)
                    stack.callback(module.set_requires_gradient_sync, True)
                elif part < last:
                    stack.enter_context(module.no_sync())
                elif part == last and isinstance(module, DistributedDataParallel):
                    stack.enter_context(_with_all_parameters(module))
            yield


@contextmanager
def _noted_forwards(found: list[Any]) -> Iterator[None]:
    """Replace what DistributedDataParallel calls as its forward begins, to note modules in ``found``.

    PyTorch's hooks of all modules would do, but torch.compile warns of them and compiles again.
    """
    from torch.distributed.algorithms.join import Join  # only where there is torch.distributed

    global _notify
    with _swapping:
        if not _noting:
            _notify = Join.notify_join_context
            setattr(Join, "notify_join_context", staticmethod(_note))  # noqa: B010, a method to type checkers
        _noting[threading.get_ident()] = found
    try:
        yield
    finally:
        with _swapping:
            del _noting[threading.get_ident()]
            if not _noting:
                setattr(Join, "notify_join_context", staticmethod(_notify))  # noqa: B010


def _note(joinable: Any) -> Any:
    if isinstance(joinable, DistributedDataParallel) and threading.get_ident() in _noting:
        _noting[threading.get_ident()].append(joinable)
    return _notify(joinable)


@contextmanager
def _with_all_parameters(module: DistributedDataParallel) -> Iterator[None]:
    """Give parameters of the module that the backward within does not reach a gradient of zero afterwards.

    DistributedDataParallel sends gradients once all parameters have had one since the last forward. A
    temperature had its own in the backward of the loss, and what this part leaves out may have had one in
    another part. With find_unused_parameters it looks for them itself.
    """
    if not module.require_backward_grad_sync or module.find_unused_parameters:
        yield
        return
    missing = {
        name: p
        for name, p in module.module.named_parameters()
        if p.requires_grad and name not in module.parameters_to_ignore
    }

    def reached(name: str, *_: Any) -> None:
        missing.pop(name, None)

    hooks = [get_gradient_edge(p).node.register_hook(partial(reached, name)) for name, p in missing.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if missing:
        zeros = [torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p) for p in missing.values()]
        torch.autograd.backward(list(missing.values()), zeros)


Outputs = tuple[Tensor, ...]


def cached_contrastive_step(
    encoder: Callable[[Any], Any],
    batches: Sequence[Any],
    loss: Callable[..., Tensor],
    *,
    module: Any = None,
    scale: Callable[[Tensor], Tensor] | None = None,
    generators: Iterable[Any] = (),
) -> Tensor:
    """Run one forward and backward pass over a batch that is encoded in parts, in the memory of one part.

    The gradients are exactly those of ``loss(*encoder(batch))`` over all parts joined together. Each part is
    encoded without a graph; the loss of all embeddings leaves their gradients; then each part is encoded
    again, with the same random numbers, and its gradients go on into the encoder. This costs one more forward
    of the encoder. What an encoder changes as it runs (the running mean of a batch norm) changes twice.

    The random numbers that repeat are those of PyTorch's generators of the CPU and of every CUDA GPU, of
    Python's ``random``, of NumPy's global generator, and of ``generators``. An encoder that draws from others
    must not draw anew when it runs again: let the parts hold what it needs.

    Every module in DistributedDataParallel that the encoder runs sends its gradients once, with the last part
    that it runs in, however it is called; processes may have different numbers of parts. Parameters of it
    that the loss alone uses, such as a temperature, are sent with them.

    Args:
        encoder: from a part to its embeddings: a tensor, or a tuple of tensors, say queries, documents and
            their masks.
        batches: the parts, at least one: whatever the encoder takes.
        loss: from the outputs, joined along their first dim, to the loss: say ``lambda Q, D:
            losses.contrastive(Q, D)``. Tensors ``[b, L, ...]`` of unequal ``L`` are padded at the end with
            zeros (False): let the encoder return masks too.
        module: the module in FSDP2 (or another wrapper with ``no_sync``) that the encoder runs, whose
            gradients are sent with the last part alone; None: the encoder itself, if it is one.
        scale: applied to the loss before its backward, say ``GradScaler().scale``.
        generators: further generators that the encoder draws from: ``torch.Generator``,
            ``numpy.random.Generator``, ``numpy.random.RandomState`` or ``random.Random`` objects.

    Returns:
        The loss, detached and not scaled. Gradients are added to the ``.grad`` of all that encoder and loss
        depend on.

    Raises:
        TypeError: an output that is no tensor, or a generator that is none. ValueError: no part, parts whose
        outputs do not fit, a loss of more than one number, or an encoder in
        ``DistributedDataParallel(static_graph=True)``, which cannot hold gradients back.

    Complexity: two forwards and a backward of the encoder; the embeddings of all parts and their gradients.
    Autocast that surrounds the call holds for all passes.

    Example:
        >>> import torch
        >>> from late_interaction import cached_contrastive_step, losses
        >>> encoder = torch.nn.Linear(16, 8)
        >>> parts = [(torch.randn(2, 4, 16), torch.randn(2, 6, 16)) for _ in range(3)]
        >>> step = cached_contrastive_step(
        ...     lambda part: (encoder(part[0]), encoder(part[1])),
        ...     parts,
        ...     lambda Q, D: losses.contrastive(Q, D, normalize=True),
        ... )
        >>> step.requires_grad, encoder.weight.grad.shape
        (False, torch.Size([8, 16]))
    """
    for name, function in (("encoder", encoder), ("loss", loss), ("scale", scale)):
        if not callable(function) and not (name == "scale" and function is None):
            raise TypeError(f"{name} must be callable, got {abbreviate(function)}")
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be a sequence of parts, got {abbreviate(batches)}")
    batches = list(batches)
    if not batches:
        raise ValueError("batches must hold at least one part, got none")
    accesses = accesses_of(generators)
    senders = Senders(encoder if module is None else module, len(batches))
    states, encoded = [], []
    with torch.no_grad():
        for i, batch in enumerate(batches):
            states.append(RandomStates(accesses))
            with senders.noted(i):
                encoded.append(_outputs(encoder(batch)))
    # Casts of weights that autocast has cached without a graph would end the gradients of the second pass.
    torch.clear_autocast_cache()
    leaves = [_leaf(parts) for parts in _columns(encoded)]
    with senders.waiting():
        value = loss(*leaves)
        scaled = value if scale is None else scale(value)
        for name, x in (("loss", value), ("scale", scaled)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must return a torch.Tensor, got {abbreviate(x)}")
            if x.numel() != 1:
                raise ValueError(f"{name} must return one number, a mean or a sum, got {shape_of(x)}")
        scaled.backward()
    gradients = [leaf.grad for leaf in leaves]
    sizes = [[x.shape for x in outputs] for outputs in encoded]
    del encoded, leaves
    begins = [0] * len(gradients)  # packed outputs have first dims of their own
    for i, batch in enumerate(batches):
        with senders.part(i), states[i].again():
            _backward(
                _outputs(encoder(batch)),
                [_part(g, b, s) for g, b, s in zip(gradients, begins, sizes[i], strict=True)],
            )
        begins = [b + s[0] for b, s in zip(begins, sizes[i], strict=True)]
    return value.detach()


def _outputs(outputs: Any) -> Outputs:
    found = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    for x in found:
        if not isinstance(x, Tensor):
            raise TypeError(f"encoder must return a tensor or a tuple of tensors, got {type(x).__name__}")
        if x.dim() == 0:
            raise ValueError("encoder must return tensors [b, ...], got a 0-dim one")
    return tuple(found)


def _columns(encoded: list[Outputs]) -> list[list[Tensor]]:
    if len({len(outputs) for outputs in encoded}) > 1:
        raise ValueError("encoder must return as many tensors for every part")
    return [list(parts) for parts in zip(*encoded, strict=True)]


def _leaf(parts: list[Tensor]) -> Tensor:
    """Join all parts of an output in one tensor, which gets a gradient if it is floating point."""
    first = parts[0]
    if any(x.dim() != first.dim() or x.shape[2:] != first.shape[2:] for x in parts):
        shapes = ", ".join(str(list(x.shape)) for x in parts[:4])
        raise ValueError(
            f"encoder must return tensors that differ in their first two dims alone, got {shapes}"
        )
    rows = sum(x.shape[0] for x in parts)
    if first.dim() > 1 and len({x.shape[1] for x in parts}) > 1:
        joined, begin = first.new_zeros(rows, max(x.shape[1] for x in parts), *first.shape[2:]), 0
        for x in parts:
            joined[begin : begin + x.shape[0], : x.shape[1]] = x
            begin += x.shape[0]
    else:
        joined = torch.cat(parts)
    return joined.detach().requires_grad_(joined.is_floating_point())


def _part(gradient: Tensor | None, begin: int, shape: torch.Size) -> Tensor | None:
    if gradient is None:
        return None
    part = gradient[begin : begin + shape[0]]
    return part if len(shape) < 2 else part[:, : shape[1]]


def _backward(outputs: Outputs, gradients: list[Tensor | None]) -> None:
    pairs = [(x, g) for x, g in zip(outputs, gradients, strict=True) if x.requires_grad and g is not None]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
