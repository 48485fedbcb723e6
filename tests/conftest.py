"""Every test runs on the CPU and, where there is one, on a CUDA GPU: ask for the fixture `device`."""

import gc
import os
from collections import Counter

import pytest
import torch

from tests import selection

# The process's first call would look at the norms of its queries.
os.environ.setdefault("LIK_SUPPRESS_NORM_WARN", "1")

# Under pytest-xdist every worker would otherwise take every core.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


CALLED = selection.CalledOperators()
NO_GPU = "needs a CUDA GPU"
GPU_TESTS_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="the tests of make quick (tests/selection.py)")


def pytest_configure(config):
    if config.getoption("quick"):
        CALLED.watch()


@pytest.hookimpl(trylast=True)  # -k has chosen
def pytest_collection_modifyitems(config, items):
    if config.getoption("quick"):
        kept = selection.quick([item.nodeid for item in items])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    # A skipped test costs a worker and its controller 1.5 ms: half of all tests are left out, and counted.
    if hasattr(config, "workerinput") and len(gpu) < len(items):
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.stash[GPU_TESTS_LEFT_OUT] = len(gpu)
        return
    for item in gpu:
        item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_collection_finish():
    """Thousands of collected tests live to the end: no garbage collection walks through them."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})
    CALLED.names.update(output.get("operators", ()))
    # Not their sum: every worker collects the same tests.
    node.config.stash[GPU_TESTS_LEFT_OUT] = output.get("gpu_tests_left_out", 0)


def pytest_sessionfinish(session):
    """A quick run of all of tests/ fails if it calls an operator nowhere; workers tell what they called."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["operators"] = sorted(CALLED.names)
        config.workeroutput["gpu_tests_left_out"] = config.stash.get(GPU_TESTS_LEFT_OUT, 0)
        return
    whole = config.getoption("quick") and config.args == ["tests"] and not config.option.keyword
    if whole and session.exitstatus == pytest.ExitCode.OK and CALLED.missing():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """What every run says at its end: what was skipped, and why, a line a reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    passed = sum("gpu" in r.keywords for r in terminalreporter.stats.get("passed", []))
    terminalreporter.write_sep("=", "skipped")
    reasons = Counter(
        ("gpu" in getattr(r, "keywords", ()), r.longrepr[2].removeprefix("Skipped: "))
        for r in skipped
        if isinstance(r.longrepr, tuple)
    )
    reasons[True, NO_GPU] += config.stash.get(GPU_TESTS_LEFT_OUT, 0)
    for (gpu, reason), count in (+reasons).most_common():
        terminalreporter.write_line(f"{count} {'GPU ' if gpu else ''}tests skipped: {reason}")
    if config.getoption("quick"):
        missing = ", ".join(CALLED.missing()) or "none"
        terminalreporter.write_line(f"{len(CALLED.names)} operators called; without a call: {missing}")
    if torch.cuda.is_available():
        terminalreporter.write_line(f"{passed} GPU tests passed on {torch.cuda.get_device_name()}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def force():
    """Forces the plan of a name on forwards of the GPU, until the test ends."""
    from late_interaction import ops

    yield ops.forced_plan
    ops.forced_plan("")


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
