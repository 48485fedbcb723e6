"""Programs that tests run, and the root of the checkout."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command, variables=None, **options):
    """What became of a command, with what it printed as text; `variables` are added to its environment."""
    if variables is not None:
        options["env"] = os.environ | {name: str(value) for name, value in variables.items()}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **options)


def python(*words, **options):
    return run(sys.executable, *words, **options)


def printed(*command, **options):
    """What a command prints, which must not fail."""
    done = run(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
