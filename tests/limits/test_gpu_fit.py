"""A driver that is too old for the CUDA library, and GPUs that it has no code for: the import and the CPU
work, and the first CUDA call says what is too old or missing, and the remedy."""

import subprocess
import sys
import types

import pytest
import torch

from late_interaction.ops import _gpu_fit, _library
from late_interaction.ops._gpu_fit import Build

WHEEL = Build(13000, ("8.0", "9.0a", "9.0+PTX"))  # of a release without code for 7.5


@pytest.mark.parametrize(
    ("driver", "works"), [(0, True), (12080, False), (13000, True), (13020, True), (14000, True)]
)
def test_a_driver_runs_the_releases_of_its_major(driver, works):
    for release in (13000, 13020):
        assert (_gpu_fit.why_not_with_driver(Build(release, ()), driver) is None) == works


@pytest.mark.parametrize(("archs", "capability", "works"), [
    ("8.0", (8, 0), True), ("8.0", (8, 9), True), ("8.6", (8, 0), False), ("8.0", (9, 0), False),
    ("9.0a", (9, 0), True), ("9.0a", (10, 0), False), ("9.0+PTX", (8, 9), False), ("9.0+PTX", (12, 0), True),
    ("9.0a+PTX", (10, 0), False), ("10.0f", (10, 3), True), ("10.0f", (12, 0), False),
    ("10.0a", (10, 3), False), ("8.0 9.0a 9.0+PTX", (7, 5), False), ("7.5 8.0", (7, 5), True),
    ("7.5+PTX", (9, 0), True), ("", (9, 0), True), ("", (7, 0), False),
])  # fmt: skip
def test_the_gpus_that_code_is_for(archs, capability, works):
    build = Build(13000, tuple(archs.split()))
    assert (_gpu_fit.why_not_on(build, 13000, "a GPU", capability) is None) == works


def test_what_is_said():
    old = _gpu_fit.why_not_with_driver(WHEEL, 12040)
    assert "(CUDA 13.0, 8.0 9.0a 9.0+PTX) is too new for the NVIDIA driver, which runs CUDA up to 12.4" in old
    assert old.endswith("update the driver, or install a wheel of CUDA 12")
    none = _gpu_fit.why_not_on(Build(13000, ("9.0a",)), 13000, "RTX 3090", (8, 6))
    assert "has no code for RTX 3090 (compute capability 8.6): install a wheel for every GPU" in none
    assert none.endswith("build it with LATE_INTERACTION_CUDA_ARCHS=8.0")
    ptx = _gpu_fit.why_not_on(WHEEL._replace(cuda=13020), 13000, "B200", (10, 0))
    assert "PTX alone for B200" in ptx and "NVIDIA driver of CUDA 13.0: update the driver" in ptx
    assert "needs 7.5 or newer" in _gpu_fit.why_not_on(WHEEL, 13000, "V100", (7, 0))
    none = _gpu_fit.why_not_on(WHEEL, 13000, "T4", (7, 5))
    assert none.endswith("or build it with LATE_INTERACTION_CUDA_ARCHS=7.5")


def test_the_version_of_the_driver(monkeypatch):
    for error, found in ((0, 12040), (1, 0)):

        def answer(version, error=error):
            version._obj.value = 12040
            return error

        driver = types.SimpleNamespace(cuDriverGetVersion=answer)
        monkeypatch.setattr(_gpu_fit.ctypes, "CDLL", lambda name, driver=driver: driver)
        assert _gpu_fit.driver_cuda() == found


@pytest.mark.gpu
def test_the_driver_and_the_gpus_that_are_here():
    assert _gpu_fit.driver_cuda() >= 12000
    assert _gpu_fit.why_on_no_gpu(_library.cuda_build) is None


@pytest.fixture
def gpus(monkeypatch):
    """GPUs that PyTorch would see."""

    def pretend(*capabilities):
        found = [types.SimpleNamespace(name=f"GPU {x}", major=x, minor=0) for x in capabilities]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
        monkeypatch.setattr(_gpu_fit, "driver_cuda", lambda: 13000)

    return pretend


@pytest.mark.parametrize(
    ("capabilities", "works"), [((), True), ((6,), False), ((6, 8), True), ((6, 10), False)]
)
def test_one_gpu_that_runs_the_library_is_enough(gpus, capabilities, works):
    gpus(*capabilities)
    reason = _gpu_fit.why_on_no_gpu(Build(13000, ("8.0", "9.0a")))
    assert (reason is None) == works and (works or "GPU 6 (compute capability 6.0)" in reason)


FIRST_CALL = """
import ctypes, types, warnings, torch
warnings.simplefilter("error")
# A CUDA build of PyTorch, and a library that loads: what is not here.
torch.version.cuda, queued = "13.0", []
torch.cuda._lazy_call = queued.append
find, load, library = __import__("importlib.util").util.find_spec, torch.ops.load_library, {library!r}
def found(name, *rest):
    return types.SimpleNamespace(origin=library) if name.endswith("._cuda") else find(name, *rest)
__import__("importlib.util").util.find_spec = found
torch.ops.load_library = lambda path: None if path == library else load(path)
def version_of_driver(version):
    version._obj.value = {driver}
    return 0
driver = types.SimpleNamespace(cuDriverGetVersion=version_of_driver)
loaded = ctypes.CDLL
ctypes.CDLL = lambda name, *rest: driver if name == "libcuda.so.1" else loaded(name, *rest)
import late_interaction as li
x = torch.ones(1, 2, 3)
if li.ops.cuda_missing is None:  # what the library would have brought
    brought = torch.library.Library("late_interaction", "IMPL")
    brought.impl("maxsim", lambda *args: args[0].sum(), "CUDA")
print(li.maxsim(x, x).item(), li.ops.cuda_missing)
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda i: types.SimpleNamespace(name="RTX 5090", major=12, minor=0)
for start in queued:
    start()
try:
    on_cuda = torch.library.get_kernel("late_interaction::maxsim", "CUDA")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    print(on_cuda.call_boxed(keys, x, x, None, None, False, "highest", "auto", False).item())
except RuntimeError as error:
    print(str(error).partition("\\n")[0])
print(li.maxsim(x, x).item())
"""


@pytest.mark.parametrize(("driver", "archs", "said"), [
    (12080, "8.0_9.0a_9.0+PTX", "too new for the NVIDIA driver, which runs CUDA up to 12.8: update"),
    (13000, "8.0_9.0a", "has no code for RTX 5090 (compute capability 12.0): install a wheel for every GPU"),
    (13000, "12.0", "6.0"),
])  # fmt: skip
def test_the_import_and_the_cpu_work_and_the_first_cuda_call_says_why(tmp_path, driver, archs, said):
    library = tmp_path / "_cuda.abi3.so"
    texts = ("namespace=late_interaction", "cuda_version=13000", f"cuda_archs={archs}")
    library.write_bytes(b"".join(f"late_interaction_{text}".encode() + b"\0" for text in texts))
    code = FIRST_CALL.format(library=str(library), driver=driver)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, call, after = run.stdout.splitlines()
    assert before.startswith("6.0 ") and said in call and after == "6.0"
