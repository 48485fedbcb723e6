"""The headers of a PyTorch release, without the release: the needed part of its wheel, by HTTP ranges.

pip says where the wheel lies. Of its gigabyte only the index and the folders below are read: a few megabytes.
They stay in .venv/torch-headers/<version>; delete that folder to fetch them again.
"""

import io
import json
import shutil
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from tests.support.programs import ROOT, python

CACHE = ROOT / ".venv" / "torch-headers"
# All of PyTorch that csrc may include, directly or not.
FOLDERS = ("torch/csrc/stable/", "torch/csrc/inductor/aoti_torch/", "torch/headeronly/")
A_DAY = 24 * 3600


class UnreachableError(Exception):
    """The registry cannot be asked, or does not answer as needed: a test that wants headers is skipped."""


class RemoteFile(io.RawIOBase):
    """A file behind a URL, read by HTTP ranges."""

    def __init__(self, url):
        self.url = url
        self.position = 0
        self.size = int(self.fetch("bytes=-1").headers["Content-Range"].rpartition("/")[2])

    def fetch(self, span):
        request = urllib.request.Request(self.url, headers={"Range": span})
        try:
            answer = urllib.request.urlopen(request, timeout=60)
        except (OSError, ValueError) as error:
            raise UnreachableError(f"PyTorch's wheel cannot be read: {error}") from error
        if answer.status != 206:
            raise UnreachableError("PyTorch's wheel cannot be read in part: its server ignores HTTP ranges")
        return answer

    def seekable(self):
        return True

    def readable(self):
        return True

    def tell(self):
        return self.position

    def seek(self, offset, whence=io.SEEK_SET):
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = max(0, start + offset)
        return self.position

    def readinto(self, buffer):
        last = min(self.position + len(buffer), self.size) - 1
        if last < self.position:
            return 0
        data = self.fetch(f"bytes={self.position}-{last}").read()
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def find_wheel(requirement):
    """(version, URL) of the wheel for Linux that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
        done = python(*command, "--report", report, "--only-binary", ":all:", requirement)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["no reason given"]
            raise UnreachableError(f"pip finds no {requirement}: {said[-1]}")
        (found,) = json.loads(report.read_text())["install"]
    return found["metadata"]["version"], found["download_info"]["url"]


def headers(release):
    """The include folder of a release ("newest": the newest that pip finds), fetched unless it is cached."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if release == "newest":
        release = newest()
    folder = CACHE / release
    if not folder.exists():
        fetch(release, folder)
    return folder / "torch" / "include"


def newest():
    """Asked once a day."""
    known = CACHE / "newest"
    if not known.exists() or time.time() - known.stat().st_mtime > A_DAY:
        known.write_text(find_wheel("torch")[0])
    return known.read_text()


def fetch(release, folder):
    wanted = tuple(f"torch/include/{name}" for name in FOLDERS)
    wheel = zipfile.ZipFile(io.BufferedReader(RemoteFile(find_wheel(f"torch=={release}")[1]), 1 << 20))
    with tempfile.TemporaryDirectory(dir=CACHE) as partial:
        wheel.extractall(partial, [name for name in wheel.namelist() if name.startswith(wanted)])
        # Another process may have fetched it meanwhile.
        if not folder.exists():
            shutil.copytree(partial, folder, dirs_exist_ok=True)
