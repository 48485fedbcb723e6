"""Scoring in C++: a module with `maxsim` becomes a package of AOTInductor, which a C++ program runs.

    python examples/aot_inductor.py                # needs g++; the package is for the CPU

The program exports and compiles the module, compiles examples/aot_inductor.cpp, runs it, and compares the
scores that it prints with its own, or ends with an error. Documents may be any number of any length.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.cpp_extension import include_paths, library_paths

import late_interaction as li

LIBRARY = Path(li.__file__).parent / "_C.abi3.so"
SOURCE = Path(__file__).with_suffix(".cpp")


class Scores(nn.Module):
    def forward(self, Q: Tensor, D: Tensor, d_mask: Tensor) -> Tensor:
        return li.maxsim(Q, D, d_mask=d_mask, normalize=True)


def package(path: Path) -> None:
    Nq, Nd, Ld = (torch.export.Dim(name, min=2) for name in ("Nq", "Nd", "Ld"))
    shapes = {"Q": {0: Nq}, "D": {0: Nd, 1: Ld}, "d_mask": {0: Nd, 1: Ld}}
    args = torch.randn(2, 4, 8), torch.randn(5, 9, 8), torch.ones(5, 9, dtype=torch.bool)
    program = torch.export.export(Scores(), args, dynamic_shapes=shapes)
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def compile_program(path: Path) -> None:
    (folder,) = library_paths()
    abi = int(torch.compiled_with_cxx11_abi())
    options = ["-std=c++20", "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    includes = [f"-I{folder}" for folder in include_paths()]
    libraries = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    needed = "-Wl,--no-as-needed"
    subprocess.run(["g++", *options, *includes, SOURCE, needed, *libraries, "-o", path], check=True)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package(folder / "scores.pt2")
        compile_program(folder / "aot_inductor")
        run = [folder / "aot_inductor", LIBRARY, folder / "scores.pt2"]
        printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    got = torch.tensor([[float(x) for x in line.split()] for line in printed.splitlines()])
    Q = torch.arange(3 * 4 * 8).float().sin().reshape(3, 4, 8)
    D = torch.arange(7 * 10 * 8).float().cos().reshape(7, 10, 8)
    wanted = Scores()(Q, D, torch.arange(10) < torch.arange(1, 8)[:, None])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    difference = (got - wanted).abs().max()
    print(f"C++ scored {list(got.shape)} as Python does; the largest difference is {difference:.1e}")


if __name__ == "__main__":
    main()
