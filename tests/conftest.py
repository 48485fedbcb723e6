"""Every test runs on the CPU and, where there is one, on a CUDA GPU: ask for the fixture `device`."""

import os
from collections import Counter

import pytest
import torch

# The process's first call would look at the norms of its queries.
os.environ.setdefault("LIK_SUPPRESS_NORM_WARN", "1")

# Under pytest-xdist every worker would otherwise take every core.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter):
    """What every run says at its end: what was skipped, and why, a line a reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    passed = sum("gpu" in r.keywords for r in terminalreporter.stats.get("passed", []))
    terminalreporter.write_sep("=", "skipped")
    reasons = Counter(
        ("gpu" in getattr(r, "keywords", ()), r.longrepr[2].removeprefix("Skipped: "))
        for r in skipped
        if isinstance(r.longrepr, tuple)
    )
    for (gpu, reason), count in reasons.most_common():
        terminalreporter.write_line(f"{count} {'GPU ' if gpu else ''}tests skipped: {reason}")
    if torch.cuda.is_available():
        terminalreporter.write_line(f"{passed} GPU tests passed on {torch.cuda.get_device_name()}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh_state():
    """The same random numbers for every test, and PyTorch's switches as a test found them."""
    torch.manual_seed(0)
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
