"""What this package uses of PyTorch that is private: a release that moves one of these names is met here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_set_dispatch_key_excluded,
    _ExcludeDispatchKeyGuard,
    _get_dispatch_mode,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._C._functorch import (
    get_single_level_autograd_function_allowed,
    is_batchedtensor,
    set_single_level_autograd_function_allowed,
)
from torch._library.simple_registry import singleton as _operators
from torch.autograd import forward_ad  # its _current_level and _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.cuda import _lazy_call as when_cuda_starts
from torch.utils import _pytree as pytree


def is_fake(x: object) -> bool:
    from torch._subclasses.fake_tensor import is_fake as is_one  # slow to import

    return bool(is_one(x))


def skip_frames(code: CodeType) -> None:
    """Keep Dynamo from the frames of ``code``, and from those below. ImportError: it has moved."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def register_fake(library: Any, name: str, fake: Callable[..., Any]) -> None:
    """Register a fake kernel as ``torch.library.register_fake`` does, but read no source file for it.

    That finds the caller's line for a message, which takes a third of the time of the import.
    """
    _operators.find(name).fake_impl.register(fake, fake.__module__, library)


def sharding_schemas() -> Any:
    """Return what DTensor knows of each operator's arguments, and import it. AttributeError: it has moved."""
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator.op_to_schema_info


_RECORDERS = DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView


@contextmanager
def recording() -> Iterator[None]:
    """Let autograd record in the kernel of an operator, which it leaves out elsewhere."""
    before = [_dispatch_tls_is_dispatch_key_excluded(key) for key in _RECORDERS]
    try:
        for key in _RECORDERS:
            _dispatch_tls_set_dispatch_key_excluded(key, False)
        yield
    finally:
        for key, excluded in zip(_RECORDERS, before, strict=True):
            _dispatch_tls_set_dispatch_key_excluded(key, excluded)
