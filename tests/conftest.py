"""Every test runs on the CPU and, where there is one, on a CUDA GPU: ask for the fixture `device`."""

import gc
import os
from collections import Counter

import pytest
import torch

from tests import selection
from tests.support.isas import ISAS

# The process's first call would look at the norms of its queries.
os.environ.setdefault("LIK_SUPPRESS_NORM_WARN", "1")

# Under pytest-xdist every worker would otherwise take every core.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


CALLED = selection.CalledOperators()
NO_GPU = "needs a CUDA GPU"
LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser):
    parser.addoption(
        "--stage", choices=["test", "ci"], help="of make ci: make test, or the tests that it left out"
    )
    parser.addoption(
        "--capability", type=int, default=0, help="plan the GPU's tests as for this one, 80 for 8.0"
    )
    parser.addoption(
        "--strength", type=int, choices=[0, *selection.FEW], default=0 if selection.NIGHTLY else 2,
        help="how many values of different arguments meet in each combination; 0: run all parameter sets",
    )  # fmt: skip


def is_whole(config):
    """Whether this run is the one of make test, not some of its files."""
    return (
        config.getoption("stage") == "test"
        and config.args == config.getini("testpaths")
        and not (config.option.keyword or config.option.markexpr)
    )


def pytest_configure(config):
    if config.getoption("stage") == "test":
        CALLED.watch()


@pytest.hookimpl(trylast=True)  # -k has chosen
def pytest_collection_modifyitems(config, items):
    left_out = selection.left_out(config, items)
    if not torch.cuda.is_available():
        gpu = [item for item in items if item.get_closest_marker("gpu")]
        # A skipped test costs a worker and its controller 1.5 ms: half of all are left out, and counted.
        if hasattr(config, "workerinput") and len(gpu) < len(items):
            left_out[NO_GPU] = gpu
        else:
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason=NO_GPU))
    config.stash[LEFT_OUT] = {}
    for reason, unwanted in left_out.items():
        unwanted = set(unwanted).intersection(items)
        config.stash[LEFT_OUT][reason] = len(unwanted)
        items[:] = [item for item in items if item not in unwanted]


def pytest_collection_finish():
    """Thousands of collected tests live to the end: no garbage collection walks through them."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip what says that it needs a newer GPU than the one of --capability."""
    try:
        return (yield)
    except RuntimeError as error:
        if item.config.option.capability and "needs compute capability" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})
    CALLED.names.update(output.get("operators", ()))
    # Not their sum: every worker collects the same tests.
    node.config.stash[LEFT_OUT] = output.get("left_out", {})


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Record what passed in make test, which fails if it calls an operator nowhere."""
    config = session.config
    if hasattr(config, "workeroutput"):  # the controller hears what a worker called
        config.workeroutput["operators"] = sorted(CALLED.names)
        config.workeroutput["left_out"] = config.stash.get(LEFT_OUT, {})
        return
    if is_whole(config):
        reports = config.pluginmanager.get_plugin("terminalreporter").stats.get("passed", [])
        config.cache.set(selection.RECORD, sorted(report.nodeid for report in reports))
        if session.exitstatus == pytest.ExitCode.OK and CALLED.missing():
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
    for reason, count in config.stash.get(LEFT_OUT, {}).items():
        reasons[reason == NO_GPU, reason] += count
    for (gpu, reason), count in (+reasons).most_common():
        terminalreporter.write_line(f"{count} {'GPU ' if gpu else ''}tests skipped: {reason}")
    if is_whole(config):
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


@pytest.fixture(params=ISAS)
def isa(request):
    """Forces an instruction set of the CPU's kernels, until the test ends."""
    import late_interaction  # noqa: F401  # registers the operators

    force = torch.ops.late_interaction.cpu_isa
    try:
        force(request.param)
    except RuntimeError as error:
        pytest.skip(f"this CPU or build has no {request.param}: {str(error).splitlines()[0]}")
    yield request.param
    force("")


@pytest.fixture
def nothing_compiled():
    """What Dynamo compiled, and counted, before and within a test is forgotten."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def planned_as():
    """Plans calls as for a GPU of a compute capability (0: its own), until the test ends."""
    from late_interaction import ops

    def plan(capability):
        try:
            ops.cuda_capability(capability)
        except ValueError as error:  # this GPU is older
            pytest.skip(str(error))

    yield plan
    ops.cuda_capability(0)


@pytest.fixture(autouse=True)
def fresh_state(request):
    """The same random numbers and planned GPU for every test, and PyTorch's switches as a test found them."""
    if request.config.option.capability and request.node.get_closest_marker("gpu"):
        if request.node.get_closest_marker("native"):
            pytest.skip("needs the kernels of the GPU as it is")
        from late_interaction import ops

        ops.cuda_capability(request.config.option.capability)
    torch.manual_seed(0)
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
