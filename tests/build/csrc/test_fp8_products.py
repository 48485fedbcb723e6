"""What products of fp8 codes compile to where a GPU has instructions for them: built, since none is here."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT, printed

INSTANCES = ROOT / "csrc" / "cuda" / "forward" / "sm80_q" / "instances"
PACKAGED = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages/nvidia/cu13/bin")
NVDISASM = shutil.which("nvdisasm", path=PACKAGED) or shutil.which("nvdisasm")


@pytest.mark.skipif(shutil.which("nvcc") is None or NVDISASM is None, reason="no nvcc or nvdisasm is here")
@pytest.mark.parametrize(
    ("arch", "code", "products"),
    [("sm_89", "e4m3", {"QMMA.16832.F32.E4M3.E4M3"}), ("sm_120", "e5m2", {"QMMA.16832.F32.E5M2.E5M2"})],
)
def test_products_of_codes(arch, code, products, tmp_path):
    binary = tmp_path / "kernels.cubin"
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-arch={arch}", "-cubin", "-o", binary]
    printed("nvcc", *flags, INSTANCES / f"{code}.cu")
    listing = printed(NVDISASM, "-c", binary)
    assert set(re.findall(r"\b[QHI]MMA\.[\w.]+", listing)) == products
