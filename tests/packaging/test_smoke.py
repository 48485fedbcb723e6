"""The smoke test that wheels are checked with (matrix.py) passes here, on the libraries just built."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_smoke():
    run = subprocess.run(
        [sys.executable, HERE / "smoke.py"],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("ok: late_interaction")
