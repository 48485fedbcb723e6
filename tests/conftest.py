"""Every test runs on the CPU and, where there is one, on a CUDA GPU: ask for the fixture `device`."""

import os

import pytest
import torch

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
    """What every run says at its end."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "gpu" in r.keywords]
    passed = sum("gpu" in r.keywords for r in terminalreporter.stats.get("passed", []))
    if not torch.cuda.is_available():
        terminalreporter.write_line(f"{len(skipped)} GPU tests skipped: no CUDA GPU on this machine")
    else:
        terminalreporter.write_line(f"GPU tests: {passed} passed, {len(skipped)} skipped")


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
