"""Calls that are refused, calls that a GPU's host does not wait for, and calls in CUDA graphs."""

from contextlib import contextmanager

import pytest
import torch


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
