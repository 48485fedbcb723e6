"""matrix.py WHEEL...: the same wheel file in every Python and torch that it is meant for.

For every Python that is found and every torch it makes an environment, installs torch and the wheel, and runs
smoke.py there. A Python that is not found, or a torch that will not install, is printed as skipped with the
reason; a smoke test that fails is a failure.

  --python 3.10,3.12       which Pythons (default: 3.10 to 3.13)
  --torch 2.10,2.13        which torch releases (default: 2.10, 2.11, 2.13)
  --torch-index URL        where torch comes from, such as https://download.pytorch.org/whl/cpu
  --env PYTHON             instead: an interpreter that has torch already (repeatable); it is not changed
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SMOKE = Path(__file__).resolve().parent / "smoke.py"


def find_python(version):
    """A working interpreter of this version: on PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    for candidate in [*map(str, installed), shutil.which(f"python{version}")]:
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    return None


def pip(python, *arguments):
    command = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def smoke(python, wheel):
    """Runs smoke.py with the wheel in a folder of its own, so that `python`'s environment stays as it is."""
    with tempfile.TemporaryDirectory() as folder:
        installed = pip(python, "install", "--no-deps", "--target", folder, wheel)
        if installed.returncode:
            return f"FAILED to install: {last_line(installed.stderr)}"
        run = subprocess.run(
            [str(python), str(SMOKE)],
            capture_output=True,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
        )
        return last_line(run.stdout) if run.returncode == 0 else f"FAILED: {last_line(run.stderr)}"


def last_line(text):
    return text.strip().splitlines()[-1] if text.strip() else "(no output)"


def in_fresh_environment(wheels, version, torch, index):
    python = find_python(version)
    if not python:
        return [f"skipped: no Python {version} on PATH or in pyenv"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = Path(folder, "bin", "python")
        got = pip(inside, "install", f"torch=={torch}.*", *(["--index-url", index] if index else []))
        if got.returncode:
            return [f"skipped: torch {torch} does not install: {last_line(got.stderr)}"]
        return [smoke(inside, wheel) for wheel in wheels]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--python", default="3.10,3.11,3.12,3.13")
    parser.add_argument("--torch", default="2.10,2.11,2.13")
    parser.add_argument("--torch-index")
    parser.add_argument("--env", action="append", default=[])
    arguments = parser.parse_args()
    wheels = [wheel.resolve() for wheel in arguments.wheels]

    results = []
    for python in map(os.path.abspath, arguments.env):
        results += [(python, result) for result in (smoke(python, wheel) for wheel in wheels)]
    if not arguments.env:
        for version in arguments.python.split(","):
            for torch in arguments.torch.split(","):
                where = f"Python {version}, torch {torch}"
                results += [
                    (where, result)
                    for result in in_fresh_environment(wheels, version, torch, arguments.torch_index)
                ]
    for where, result in results:
        print(f"{where}: {result}", flush=True)
    skipped = sum(result.startswith("skipped") for _, result in results)
    failed = sum(result.startswith("FAILED") for _, result in results)
    print(f"{len(results) - skipped - failed} passed, {failed} failed, {skipped} skipped")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
