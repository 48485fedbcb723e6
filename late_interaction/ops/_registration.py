"""How an operator is registered with PyTorch, and what the operators share for it.

A module of this folder describes its operators by :func:`register_forward`, :func:`register_backward` and
:func:`register_helper`:

- a fake kernel, which says shapes and dtypes to torch.compile, torch.export and meta tensors. It gets all
  arguments by their names in the schema, and names those that it reads;
- a kernel of the Autograd dispatch key, as ``torch.library.register_autograd`` would make it, but without its
  generality: the host's time bounds a small training step;
- kernels of the Autocast keys;
- a rule for vmap, and an error for CUDA tensors where the CUDA library is missing.

Under the transforms of ``torch.func`` the dispatcher calls an Autograd kernel once a level, and the kernel
records its function at that level (:func:`applied`). ``grad``, ``vjp`` and ``jacrev`` work; every kernel
refuses forward-mode derivatives (``jvp``, ``jacfwd``, dual tensors).

Autocast leaves float32 inputs float32 and multiplies in the autocast dtype, so gradients come in float32. A
cast would keep a half-precision copy of Q and D alive until the backward and round their gradients. Inputs
of two dtypes (half and float32) are cast to the autocast dtype. float64 stays, as everywhere in autocast.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._checks.messages import no_double_backward
from late_interaction._checks.tensors import check_no_forward_ad
from late_interaction._scoring.precision import AUTOCAST_PRECISION
from late_interaction._torch import (
    DispatchKey,
    DispatchKeySet,
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _ExcludeDispatchKeyGuard,
    _SingleLevelFunction,
    forward_ad,
    get_single_level_autograd_function_allowed,
    register_fake,
    set_single_level_autograd_function_allowed,
)
from late_interaction.ops._library import library, operators, qualified, refuse_without_cuda

Kernel = Callable[..., Any]
Autocast = Callable[[Any, str, DispatchKey], Kernel]


# ---- registration ----


def register_forward(
    op: Any, fake: Kernel, autograd: Kernel, autocast: Autocast | None = None, packed: bool = False
) -> None:
    """Register an operator that returns scores. autocast: makes its kernel of an Autocast key."""
    _register(op, fake, autograd, _no_vmap(op, packed))
    if autocast is not None:
        for device_type, key in (("cpu", DispatchKey.AutocastCPU), ("cuda", DispatchKey.AutocastCUDA)):
            library.impl(op, autocast(op, device_type, key), key.name)


def register_without_gradients(
    name: str, fake: Kernel, autocast: Autocast | None = None, packed: bool = False
) -> None:
    """Register the operator of scores ``name``, which refuses inputs that require a gradient."""
    op = getattr(operators, name).default
    register_forward(op, fake, without_gradients(op), autocast, packed)


def register_backward(op: Any, fake: Kernel, autograd: Kernel | None = None) -> None:
    """Register an operator that returns gradients, which has none of its own."""
    _register(op, fake, autograd or differentiable(op, partial(once, op)), _vmap_one_by_one(op))


_no_autograd: dict[Any, Any] = {}


def register_no_autograd(op: Any, name: str, fake: Kernel) -> None:
    """Register the operator ``name``, which does what ``op`` does and has no kernel of the Autograd key.

    It is called where ``op`` would be called below autograd: compiled graphs then hold it, and run no kernel
    in Python before the one in C++.
    """
    other = getattr(operators, name).default
    _register_fake(other, fake)
    library.impl(other, torch.library.fallthrough_kernel, "Autograd")
    refuse_without_cuda(other)
    _no_autograd[op] = other


def register_helper(op: Any, fake: Kernel) -> None:
    """Register a step of an operator, without gradients."""
    _register_fake(op, fake)
    _register_autograd(op, without_gradients(op))


def _register(op: Any, fake: Kernel, autograd: Kernel, vmap: Kernel) -> None:
    _register_fake(op, fake)
    _register_autograd(op, autograd)
    torch.library.register_vmap(op.name(), vmap)
    refuse_without_cuda(op)


def _register_fake(op: Any, fake: Kernel) -> None:
    defaults = {x.name: x.default_value for x in op._schema.arguments}  # the dispatcher leaves them out

    def by_name(*args: Any, **kwargs: Any) -> Any:
        return fake(**{**defaults, **dict(zip(defaults, args, strict=False)), **kwargs})

    register_fake(library, op.name(), by_name)


def _register_autograd(op: Any, kernel: Kernel) -> None:
    name = _name(op)

    def without_tangents(*args: Any) -> Any:
        if forward_ad._current_level >= 0:
            check_no_forward_ad(name, *args)
        return kernel(*args)

    library.impl(op, without_tangents, "Autograd")


def _name(op: Any) -> str:
    name: str = op.name()
    return name.removeprefix(qualified(""))


# ---- fake kernels ----


def fake_nothing(**_: Any) -> None:
    """Fake an operator that writes into its arguments and returns nothing."""


def count_sequences(name: str, cu_seqlens: Tensor) -> int:
    """Count packed sequences by their offsets, of which the kernels check the rest."""
    torch._check(
        cu_seqlens.dim() == 1, lambda: f"late_interaction: {name} must be 1-D, got {cu_seqlens.dim()} dims"
    )
    return cu_seqlens.shape[0] - 1


def fake_gradient(x: Tensor, needed: bool) -> Tensor:
    """Make a fake gradient; one that is not needed has zero elements."""
    return x.new_empty(x.shape if needed else (0,))


def fake_gradients(
    Q: Tensor, D: Tensor, need_grad_Q: bool, need_grad_D: bool, q_weights: Tensor | None = None,
    need_grad_weights: bool = True, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Fake the gradients of tokens, and of their weights where there are some."""
    grads = fake_gradient(Q, need_grad_Q), fake_gradient(D, need_grad_D)
    return (
        grads if q_weights is None else (*grads, fake_gradient(q_weights, need_grad_Q and need_grad_weights))
    )


# ---- kernels of the Autograd key ----


def applied(function: type[Function]) -> Any:
    """Return ``function.apply`` for a kernel of the Autograd key.

    Under the transforms of ``torch.func`` it records the function at one level, as PyTorch's own operators
    do: ``Function.apply`` would hand the call to every active level, but the dispatcher has chosen the level
    already.
    """
    plain: Any = super(Function, function).apply  # type: ignore[misc]  # PyTorch 2.14 has a wrapper in Python
    steps = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    at_a_level: Any = type(function.__name__, (_SingleLevelFunction,), steps)

    def apply(*args: Any) -> Any:
        if not _are_functorch_transforms_active():
            return plain(*args)
        before = get_single_level_autograd_function_allowed()
        set_single_level_autograd_function_allowed(True)
        try:
            return at_a_level.apply(*args)
        finally:
            set_single_level_autograd_function_allowed(before)

    return apply


def call_in_function(op: Any, *args: Any) -> Any:
    """Call ``op`` below autograd in the forward of an autograd ``Function``.

    A level of ``torch.func`` under the one that the function is recorded at records the call as well, which
    such a forward disables.
    """
    if _are_functorch_transforms_active():
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), _AutoDispatchBelowAutograd():
            return op(*args)
    return _call_below_autograd(op, args)


def _call_below_autograd(op: Any, args: tuple[Any, ...]) -> Any:
    other = _no_autograd.get(op)
    if other is not None:
        return other(*args)
    with _AutoDispatchBelowAutograd():
        return op(*args)


def call_without_gradients(op: Any, *args: Any) -> Any:
    """Call ``op`` below autograd in a kernel of its Autograd key, where nothing requires a gradient.

    That is at this level of ``torch.func``, where there are several.
    """
    if not _are_functorch_transforms_active():
        return _call_below_autograd(op, args)
    with _AutoDispatchBelowAutograd():
        return op(*args)


def call_in_backward(op: Any, *args: Any) -> Any:
    """Call ``op``, below autograd unless the backward is differentiated itself.

    That is by create_graph=True, torch.func or dual tensors.
    """
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return op(*args)
    return _call_below_autograd(op, args)


class Once(Function):
    """A backward operator, which has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, op: Any, *args: Any) -> Any:
        ctx.op = op
        return call_in_function(op, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise no_double_backward(*_TWICE[_name(ctx.op).partition("_backward")[0]])


_UNWEIGHTED = "late_interaction.maxsim of padded tokens, Q times the weights"
# By operator, what was called and what differentiates twice.
_TWICE = {
    "maxsim_weighted": ("maxsim with q_weights", _UNWEIGHTED),
    "maxsim_varlen_weighted": ("maxsim with q_weights", _UNWEIGHTED),
    "maxsim_pairs_packed_weighted": ("score_pairs_packed with q_weights", _UNWEIGHTED),
    "maxsim_varlen": ("maxsim of packed tokens", "late_interaction.maxsim of Tokens.to_padded()"),
    "maxsim_pairs_packed": ("score_pairs_packed", "late_interaction.maxsim_pairs of Tokens.to_padded()"),
    "maxsim_from_hidden": ("maxsim_from_hidden", "late_interaction.maxsim of projected tokens"),
    "maxsim_residual": ("maxsim_residual", "late_interaction.maxsim of decompressed documents"),
    "smooth_maxsim": ("smooth_maxsim", "late_interaction.reference.smooth_maxsim_reference"),
}


once = applied(Once)


def requires_gradient(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)


def differentiable(op: Any, function: Kernel) -> Kernel:
    """Make the Autograd kernel of ``op``: ``function`` where an argument requires a gradient."""
    defaults = [argument.default_value for argument in op._schema.arguments]  # the dispatcher leaves them out

    def kernel(*args: Any) -> Any:
        if requires_gradient(args):
            return function(*args, *defaults[len(args) :])
        with _AutoDispatchBelowAutograd():
            return op(*args)

    return kernel


def without_gradients(op: Any) -> Kernel:
    def kernel(*args: Any) -> Any:
        if requires_gradient(args):
            raise RuntimeError(f"{op} has no gradients: detach its arguments, or use torch.no_grad()")
        with _AutoDispatchBelowAutograd():
            return op(*args)

    return kernel


# ---- kernels of the Autocast keys ----


def autocast_pair(op: Any, device_type: str, key: DispatchKey) -> Kernel:
    """Make the Autocast kernel of an operator that takes ``(Q, D, ..., precision, ...)``."""
    exclude = DispatchKeySet(key)
    defaults = [argument.default_value for argument in op._schema.arguments]
    at = [argument.name for argument in op._schema.arguments].index("precision") - 2  # behind Q and D

    def autocast(Q: Tensor, D: Tensor, *given: Any) -> Any:
        rest = [*given, *defaults[2 + len(given) :]]
        dtype = torch.get_autocast_dtype(device_type)
        if Q.dtype != D.dtype and torch.float64 not in (Q.dtype, D.dtype):
            Q, D = Q.to(dtype), D.to(dtype)
        elif Q.dtype == torch.float32:
            rest[at] = AUTOCAST_PRECISION.get(dtype, rest[at])
        with _ExcludeDispatchKeyGuard(exclude):
            return op(Q, D, *rest)

    return autocast


# ---- what is not supported ----


def _no_vmap(op: Any, packed: bool) -> Callable[..., NoReturn]:
    def vmap(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> NoReturn:
        how = (
            "pack all sequences"
            if packed
            else "pass Q as [Nq, Lq, d] and D as [Nd, Ld, d], or as [Nq, K, Ld, d] if each query has its own"
        )
        raise RuntimeError(f"{op.name()} does not support vmap: it is batched already, so {how}")

    return vmap


def _vmap_one_by_one(op: Any) -> Kernel:
    """Call ``op`` for each entry of the batch in turn. Its results have the batch as their first dim."""

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        def entry(i: int) -> Any:
            return op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)))

        results = [entry(i) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return vmap
