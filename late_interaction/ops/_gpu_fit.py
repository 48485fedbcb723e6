"""Tells whether the CUDA library runs with the driver and on the GPUs that are here, before CUDA would."""

import ctypes
import re
from typing import NamedTuple

import torch

from late_interaction._version import __version__

_OLDEST = (7, 5)


class Build(NamedTuple):
    """What the CUDA library says of itself (csrc/cuda/runtime/build.cpp)."""

    cuda: int  # as CUDART_VERSION: 13020 for 13.2
    archs: tuple[str, ...]  # "8.0", "9.0a", "9.0+PTX"; empty where the build did not say

    def __str__(self) -> str:
        return f"late_interaction {__version__} (CUDA {release(self.cuda)}, {' '.join(self.archs) or '?'})"


def release(cuda: int) -> str:
    """Write a version of CUDA as its release is called."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def driver_cuda() -> int:
    """Return the newest CUDA that the NVIDIA driver runs, or 0 without a driver. CUDA is not started."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return 0 if failed else version.value


def why_not_with_driver(build: Build, driver: int) -> str | None:
    """Say why the library cannot run with a driver of this version, 0 for none. A driver runs its major."""
    if not driver or driver // 1000 >= build.cuda // 1000:
        return None
    return (
        f"{build} is too new for the NVIDIA driver, which runs CUDA up to {release(driver)}: update the"
        f" driver, or install a wheel of CUDA {driver // 1000}"
    )


def why_not_on(build: Build, driver: int, name: str, capability: tuple[int, int]) -> str | None:
    """Say why the library has no code that a GPU of this name and compute capability can run."""
    gpu = f"{name} (compute capability {capability[0]}.{capability[1]})"
    if capability < _OLDEST:
        return f"{gpu} is too old: {build} needs 7.5 or newer"
    images = [_serves(arch, capability) for arch in build.archs]
    if not images or "code" in images:
        return None
    own = {7: "7.5", 9: "9.0a"}.get(capability[0], f"{capability[0]}.0")
    flag = f"LATE_INTERACTION_CUDA_ARCHS={own}"
    if "PTX" not in images:
        return f"{build} has no code for {gpu}: install a wheel for every GPU, or build it with {flag}"
    if driver and driver < build.cuda:  # PTX, unlike machine code, has to be of the driver's release
        return (
            f"{build} has PTX alone for {gpu}, which is too new for the NVIDIA driver of CUDA"
            f" {release(driver)}: update the driver, or build it with {flag}"
        )
    return None


def _serves(arch: str, capability: tuple[int, int]) -> str | None:
    """Return what code for ``arch`` is to a GPU of this capability: "code", "PTX" or nothing."""
    found = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
    if found is None:
        return None
    own, exact, ptx = (int(found[1]), int(found[2])), found[3] == "a", bool(found[4])
    newer = own <= capability and ((ptx and not found[3]) or own[0] == capability[0])
    fits = own == capability if exact else newer
    return ("PTX" if ptx else "code") if fits else None


def why_on_no_gpu(build: Build) -> str | None:
    """Say why the first GPU cannot run the library, if none can. It starts CUDA."""
    driver, reasons = driver_cuda(), []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        reasons.append(why_not_on(build, driver, gpu.name, (gpu.major, gpu.minor)))
    return reasons[0] if reasons and all(reasons) else None
