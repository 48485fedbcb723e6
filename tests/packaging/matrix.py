"""matrix.py FILE...: the same wheel, or source distribution, in every Python and torch that it is meant for.

For every Python that is found and every torch it makes an environment, installs torch and the file, and runs
smoke.py there. A source distribution is built there, for the CPU, under the first and the last torch alone.
A Python that is not found, or a torch that will not install, is printed as skipped with the reason. It fails
where a smoke test fails, and where nothing was left to run.

  --python 3.10,3.12       which Pythons (default: 3.10 to 3.14)
  --torch 2.10,2.13        which torch releases, from old to new (default: 2.10, 2.11, 2.13 and the newest)
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
    environment = os.environ | {"LATE_INTERACTION_WITH_CUDA": "0"}  # for a source distribution
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)


def smoke(python, file):
    """Runs smoke.py with the file in a folder of its own, so that `python`'s environment stays as it is."""
    with tempfile.TemporaryDirectory() as folder:
        installed = pip(python, "install", "--no-deps", "--no-build-isolation", "--target", folder, file)
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


def is_source(file):
    return file.name.endswith(".tar.gz")


def in_fresh_environment(files, version, torch, index):
    python = find_python(version)
    if not python:
        return [f"skipped: no Python {version} on PATH or in pyenv"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = Path(folder, "bin", "python")
        wanted = "torch" if torch == "newest" else f"torch=={torch}.*"
        got = pip(inside, "install", wanted, *(["--index-url", index] if index else []))
        if got.returncode:
            return [f"skipped: torch {torch} does not install: {last_line(got.stderr)}"]
        if any(map(is_source, files)):
            tools = pip(inside, "install", "setuptools>=77", "ninja")
            if tools.returncode:
                return [f"FAILED: no tools to build with: {last_line(tools.stderr)}"]
        return [smoke(inside, file) for file in files]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--python", default="3.10,3.11,3.12,3.13,3.14")
    parser.add_argument("--torch", default="2.10,2.11,2.13,newest")
    parser.add_argument("--torch-index")
    parser.add_argument("--env", action="append", default=[])
    arguments = parser.parse_args()
    files = [file.resolve() for file in arguments.files]
    wheels = [file for file in files if not is_source(file)]

    results = []
    for python in map(os.path.abspath, arguments.env):
        results += [(python, result) for result in (smoke(python, file) for file in files)]
    if not arguments.env:
        releases = arguments.torch.split(",")
        for version in arguments.python.split(","):
            for torch in releases:
                tried = files if torch in (releases[0], releases[-1]) else wheels
                where = f"Python {version}, torch {torch}"
                found = in_fresh_environment(tried, version, torch, arguments.torch_index) if tried else []
                results += [(where, result) for result in found]
    for where, result in results:
        print(f"{where}: {result}", flush=True)
    skipped = sum(result.startswith("skipped") for _, result in results)
    failed = sum(result.startswith("FAILED") for _, result in results)
    passed = len(results) - skipped - failed
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(bool(failed) or not passed)


if __name__ == "__main__":
    main()
