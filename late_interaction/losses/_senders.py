"""Distributed modules under an encoder that runs in parts: each sends its gradients with its last part."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

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
