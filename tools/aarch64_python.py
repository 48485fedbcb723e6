"""aarch64_python.py FOLDER: CPython for aarch64, which runs under qemu-user on another machine.

FOLDER/root gets the files of Debian's packages. FOLDER/root/usr/bin/python is a script that runs the
interpreter under emulation, with the packages that pip has put into FOLDER; programs that it starts, such as
a cross compiler, run as they are. apt-get downloads the packages from the archive of this machine, which must
be Debian 12: nothing is installed, and apt's lists and state lie in FOLDER.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PYTHON = "python3.11"
PACKAGES = [
    *(PYTHON, f"{PYTHON}-minimal", f"lib{PYTHON}-minimal", f"lib{PYTHON}-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libbz2-1.0", "liblzma5", "libexpat1", "libffi8"),
    *("libssl3", "libsqlite3-0", "libuuid1", "libcrypt1", "libtinfo6", "libncursesw6", "libreadline8"),
]
PLACES = {"State": "state", "State::status": "status", "Cache": "cache"}  # of apt
SCRIPT = """#!/bin/sh
export QEMU_LD_PREFIX={folder}/root PYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}"
export PYTHONDONTWRITEBYTECODE=1
exec {emulator} -cpu "${{QEMU_CPU:-max}}" -0 "$0" {folder}/root/usr/bin/{python} "$@"
"""


def download(folder: Path) -> list[Path]:
    """The packages' files, by an apt that knows aarch64 alone."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    own = (f"Dir::{kind}={folder}/{name}" for kind, name in PLACES.items())
    options = ("APT::Architecture=arm64", "APT::Architectures::=arm64", "APT::Sandbox::User=", *own)
    apt = ["apt-get", "--quiet", *(word for option in options for word in ("-o", option))]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *PACKAGES], cwd=folder, check=True)
    return sorted(folder.glob("*.deb"))


def main(place: str) -> None:
    folder = Path(place).resolve()
    for name, package in (("qemu-aarch64", "qemu-user"), ("apt-get", "Debian's apt"), ("dpkg-deb", "dpkg")):
        if not shutil.which(name):
            sys.exit(f"no {name} is on PATH: install {package}")
    root, packages = folder / "root", folder / "debian"
    for old in (root, packages):
        shutil.rmtree(old, ignore_errors=True)
    packages.mkdir(parents=True)
    for package in download(packages):
        subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
    shutil.rmtree(packages)
    script = root / "usr/bin/python"
    script.write_text(SCRIPT.format(folder=folder, emulator=shutil.which("qemu-aarch64"), python=PYTHON))
    script.chmod(0o755)
    asked = "import platform, sys; print(platform.machine(), sys.executable)"
    told = subprocess.run([script, "-c", asked], check=True, capture_output=True, text=True).stdout
    if told.split() != ["aarch64", os.fspath(script)]:
        sys.exit(f"{script} is no interpreter for aarch64 that finds itself")


if __name__ == "__main__":
    main(*sys.argv[1:])
