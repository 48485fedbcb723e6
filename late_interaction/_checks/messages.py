"""The words in which a message describes an argument, however large the argument is."""

import reprlib

from torch import Tensor

_NAMED = 4  # bad entries that a message names
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


def abbreviate(value: object) -> str:
    """A short form of any argument."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {shape_of(value)}"
    return _SHORT.repr(value)


def shape_of(x: Tensor) -> str:
    return "of nested sequences" if x.is_nested else str(list(x.shape))


def describe_bad_entries(name: str, x: Tensor, bad: Tensor, after: bool = False) -> str:
    """The dtype and shape of x, and the first of its bad entries.

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
