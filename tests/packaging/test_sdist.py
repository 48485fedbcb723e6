"""The source distribution holds what building and testing take, and a package index shows it well."""

import email
import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import late_interaction
from tests.support.programs import ROOT, printed

# What serves a git checkout alone.
CHECKOUT_ONLY = re.compile(r"\.ci/|\.github/|(.*/)?\.gitignore$|\.pre-commit-config\.yaml$")
REPOSITORY = "https://example.org/someone/late_interaction"


def run(*command, cwd, **environment):
    # Nothing here asks for CUDA, and nvcc need not be looked at. No other run reads their bytecode.
    environment |= {"LATE_INTERACTION_WITH_CUDA": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    return printed(*command, cwd=cwd, variables=environment)


@pytest.fixture(scope="module")
def tracked():
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def unpacked(tracked, tmp_path_factory):
    """A source distribution, made from a copy of the checkout and unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in tracked:
        copy = folder / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    sdist = (sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", folder)
    run(*sdist, cwd=folder / "checkout", LATE_INTERACTION_REPOSITORY=REPOSITORY)
    (archive,) = folder.glob("*.tar.gz")
    checked = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 and later
    with tarfile.open(archive) as opened:
        opened.extractall(folder, **checked)
    return folder / archive.name.removesuffix(".tar.gz")


def test_it_holds_what_is_tracked(unpacked, tracked):
    held = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    wanted = {name for name in tracked if not CHECKOUT_ONLY.match(name)}
    assert held - {"PKG-INFO", "setup.cfg"} == wanted


def test_cmake_configures_it(unpacked, tmp_path):
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("no cmake")
    prefix = run(sys.executable, "-c", "import torch; print(torch.utils.cmake_prefix_path)", cwd=tmp_path)
    run(cmake, "-S", unpacked, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix.strip()}", cwd=tmp_path)
    assert "test_ops" in run(cmake, "--build", tmp_path, "--target", "help", cwd=tmp_path)


def test_its_tests_are_all_found(unpacked):
    for library in Path(late_interaction.__file__).parent.glob("*.abi3.so"):
        shutil.copy(library, unpacked / "late_interaction" / library.name)
    pytest_ = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    collected = run(*pytest_, "--assert=plain", "--override-ini", "testpaths=tests", cwd=unpacked)
    assert "tests/maxsim/test_forward.py::" in collected and "tests/build/test_libraries.py::" in collected


def description(folder):
    """What a package index shows, without blocks of code, and its links."""
    shown = email.message_from_string((folder / "PKG-INFO").read_text()).get_payload()
    assert "# late_interaction" in shown and "```python" in shown
    shown = re.sub(r"^```.*?^```$", "", shown, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", shown)
    assert [link for link in links if not re.match(r"https?://|#", link)] == []
    return shown, links


def test_links_point_into_the_repository(unpacked):
    _, links = description(unpacked)
    release = (unpacked / "VERSION").read_text().strip()
    assert f"{REPOSITORY}/blob/v{release}/docs/architecture.md" in links
    assert f"{REPOSITORY}/raw/v{release}/bench/results/roofline.png" in links


def test_a_package_index_links_to_the_repository(unpacked):
    urls = email.message_from_string((unpacked / "PKG-INFO").read_text()).get_all("Project-URL")
    release = (unpacked / "VERSION").read_text().strip()
    assert f"Repository, {REPOSITORY}" in urls
    assert f"Changelog, {REPOSITORY}/blob/v{release}/CHANGELOG.md" in urls


def test_without_a_repository_no_link_is_left_to_break(unpacked):
    run(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", unpacked, cwd=unpacked)
    shown, _ = description(unpacked / "late_interaction.egg-info")
    assert "docs/architecture.md" in shown and "![" not in shown


def test_a_wheel_carries_the_notices(unpacked, tmp_path):
    """Packs without compiling: the licences come from the metadata."""
    wheel = ("bdist_wheel", "--skip-build", "--dist-dir", tmp_path, "--bdist-dir", tmp_path / "packed")
    run(sys.executable, "setup.py", "--quiet", *wheel, cwd=unpacked)
    (made,) = tmp_path.glob("*.whl")
    packed = zipfile.ZipFile(made)
    licences = {name.partition(".dist-info/licenses/")[2]: name for name in packed.namelist()}
    assert {"LICENSE", "third_party/NOTICE"} <= set(licences)
    notice = packed.read(licences["third_party/NOTICE"]).decode()
    assert "libcudart_static.a" in notice
    for text in re.findall(r"licenses/\S+\.txt", notice):
        assert f"third_party/{text}" in licences
