"""The libraries keep their binary contract: whoever has torch >= 2.10 and Python >= 3.10 can load them."""

import os
import re
import shutil
from pathlib import Path

import pytest

import late_interaction
from tests.support.programs import ROOT, printed

LIBRARIES = sorted(Path(late_interaction.__file__).parent.glob("*.abi3.so"))
# What a C++ library links on any Linux.
SYSTEM = re.compile(r"lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so\.\d+|ld-linux.*")


@pytest.fixture(params=LIBRARIES, ids=lambda path: path.name)
def library(request):
    return request.param


def readelf(*arguments):
    if not shutil.which("readelf"):
        pytest.skip("no readelf")
    return printed("readelf", "-W", *arguments)


def test_links_only_the_cpu_part_of_torch(library):
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", library)))
    assert {name for name in needed if not SYSTEM.fullmatch(name)} == {"libtorch_cpu.so", "libc10.so"}


def test_uses_only_the_stable_abi(library):
    """From PyTorch it takes C functions (the aoti and stable shims), no C++ class; from Python, nothing."""
    table = [line.split() for line in readelf("--dyn-syms", library).splitlines()]
    undefined = {row[7].split("@")[0] for row in table if len(row) > 7 and row[6] == "UND"}
    assert undefined
    unstable = {name for name in undefined if re.match(r"_ZNK?(2at|3c10|5torch)|Py|_Py", name)}
    assert unstable == set()


def test_names_no_folder_of_the_machine_that_built_it(library):
    """Messages of failed checks name a source file: csrc/..., torch/include/..., wherever it lay."""
    texts = [text.decode() for text in re.findall(rb"[\x20-\x7e]{8,}", library.read_bytes())]
    names = [text for text in texts if re.search(r"(csrc|torch)/\S*\.(h|cpp|cu|cuh)$", text)]
    assert "csrc/common/tensors.h" in {os.path.normpath(name) for name in names}
    assert [name for name in names if name.startswith("/")] == []
    folders = (str(ROOT), "/site-packages/", "/dist-packages/")
    assert [text for text in texts if any(folder in text for folder in folders)] == []
