"""CMake builds CUDA for the same GPUs as setup.py (test_setup_messages.py)."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.build.fakes import fake_toolkit, script
from tests.support.programs import ROOT, run

CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
ALL = "75-real;80-real;89-real;90a-real;100-real;120-real;90-virtual"


@pytest.mark.skipif(CMAKE is None, reason="no cmake")
@pytest.mark.parametrize(
    ("gpus", "architectures"),
    [
        ([], ALL),
        (["7.0"], ALL),
        (["7.5"], "75-real"),
        (["9.0", "9.0"], "90a-real"),
        (["8.9", "7.0"], "89-real"),
        (["8.6", "9.0"], "80-real;90a-real"),
        (["10.3"], "100-real"),
        (["13.0"], "90-virtual"),
    ],
)
def test_architectures(tmp_path, gpus, architectures):
    lines = "\\n".join(gpus)
    script(tmp_path / "bin" / "nvidia-smi", f"printf '{lines}\\n'" if gpus else "exit 9")
    nvcc = Path(fake_toolkit(tmp_path / "cuda", "13.0"), "bin", "nvcc")
    program = tmp_path / "ask.cmake"
    program.write_text(
        f"include({ROOT}/cmake/GpuArchitectures.cmake)\n"
        "late_interaction_gpu_architectures(found)\n"
        'message(NOTICE "${found}")\n'
    )
    variables = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = run(CMAKE, f"-DCMAKE_CUDA_COMPILER={nvcc}", "-P", program, variables=variables)
    assert done.returncode == 0 and done.stderr.strip() == architectures
