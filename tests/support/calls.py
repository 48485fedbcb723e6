"""Calls that are refused, that a GPU's host does not wait for, in CUDA graphs, and that want a compiler."""

import shutil
from contextlib import contextmanager

import pytest
import torch

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="TorchInductor needs a C++ compiler"
)


def refused(error, words, function, *args, **options):
    """Require that the call raises this error, whose message is one line with these words."""
    with pytest.raises(error) as caught:
        function(*args, **options)
    said = str(caught.value)
    assert "\n" not in said and all(word in said for word in words), said


@contextmanager
def waiting_for_nothing():
    """Raise an error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def in_graph(function):
    """(graph, results): a CUDA graph of a call, and what it writes to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, function()
