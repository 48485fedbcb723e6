"""The words in which a message describes an argument, however large the argument is."""

import reprlib
from typing import Any

from torch import Tensor

_NAMED = 4  # bad entries that a message names
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


def abbreviate(value: object) -> str:
    """Describe any argument in a few words."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {shape_of(value)}"
    return _SHORT.repr(value)


def no_tensor(name: str, x: Any) -> str:
    """Describe an argument that is no tensor, and how to make it one."""
    kind = type(x).__name__
    if _is_array(x):
        return f"{kind}: torch.from_numpy({name}) is one"
    if not isinstance(x, (list, tuple)) or not x:
        return kind
    if _is_array(x[0]):
        return f"{kind} of {type(x[0]).__name__}: make each a tensor by torch.from_numpy first"
    if isinstance(x[0], Tensor):
        return (
            f"{kind} of tensors: torch.nn.utils.rnn.pad_sequence pads them (leave the padding out by a mask),"
            " late_interaction.Tokens.from_list packs them"
        )
    return f"{kind}: torch.tensor({name}) is one"


def _is_array(x: Any) -> bool:
    return any(base.__module__ == "numpy" and base.__name__ == "ndarray" for base in type(x).__mro__)


def shape_of(x: Tensor) -> str:
    return "of nested sequences" if x.is_nested else str(list(x.shape))


def describe_bad_entries(name: str, x: Tensor, bad: Tensor, after: bool = False) -> str:
    """Describe the dtype and shape of x, and the first of its bad entries.

    bad: a bool tensor of the shape of x. after: a bad entry is shown with the entry before it.
    """
    places = bad.nonzero()
    named = []
    for place in places[:_NAMED].tolist():
        entry = f"{name}[{', '.join(map(str, place))}] = {x[tuple(place)].item()}"
        if after and place[0]:
            entry += f" after {x[place[0] - 1].item()}"
        named.append(entry)
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return f"{str(x.dtype).removeprefix('torch.')} {shape_of(x)} with {', '.join(named)}{more}"


def describe_bad_lengths(name: str, lengths: Tensor, bad: Tensor, least: int, longest: int) -> str:
    lower = "> 0" if least else ">= 0"
    got = describe_bad_entries(name, lengths, bad)
    return f"{name} must all be {lower} and <= {longest}, got {got}"


def no_double_backward(called: str, instead: str) -> RuntimeError:
    """Make the error of a backward that is differentiated, which names what can be."""
    return RuntimeError(
        f"double backward of {called} is not supported: differentiate {instead}, or call backward or"
        " torch.autograd.grad without create_graph=True"
    )
