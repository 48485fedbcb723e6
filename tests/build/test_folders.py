"""How many files a folder has: few enough to be read as a list."""

import pytest

from tests.support.programs import ROOT

MOST = 25
# Folders that may have more, and how many: each module of the package is a path that users import, and each
# record is a file.
MORE = {"late_interaction": 40, "bench/results": 40}
FOLDERS = ["bench", "cmake", "csrc", "demo", "docs", "examples", "late_interaction", "tests", "tools"]
NOT_OURS = {".so", ".pyc"}  # built here


def folders():
    for top in FOLDERS:
        yield from (path for path in [ROOT / top, *(ROOT / top).rglob("*")] if path.is_dir())


@pytest.mark.parametrize("folder", [path.relative_to(ROOT).as_posix() for path in folders()])
def test_a_folder_has_few_files(folder):
    files = [path for path in (ROOT / folder).iterdir() if path.is_file() and path.suffix not in NOT_OURS]
    assert len(files) <= MORE.get(folder, MOST), f"{folder} has {len(files)} files"
