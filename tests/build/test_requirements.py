"""The pinned requirements are releases that the extras of pyproject.toml allow."""

import re

import pytest
from packaging.requirements import Requirement

from tests.support.programs import ROOT

tomllib = pytest.importorskip("tomllib")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(name):
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if re.match(r"[a-z]", line)]
    return {
        pin.name: str(pin.specifier).removeprefix("==")
        for pin in found
        if not pin.marker or pin.marker.evaluate()
    }


EXTRAS = PROJECT["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("ranges", "files"),
    [
        *((EXTRAS[extra], ("build", extra)) for extra in ("bench", "dev", "demo")),
        (PROJECT["build-system"]["requires"], ("build",)),
        *((EXTRAS[extra], (extra,)) for extra in ("lancedb", "ray")),
        (EXTRAS["arrow"], ("lancedb",)),
    ],
    ids=str,
)
def test_what_make_installs_is_what_the_project_allows(ranges, files):
    pinned = {name: release for file in files for name, release in pins(file).items()}
    for wanted in map(Requirement, ranges):
        assert wanted.name in pinned, wanted
        assert wanted.specifier.contains(pinned[wanted.name]), wanted


@pytest.mark.parametrize("extra", ["pylate", "colpali", "sentence-transformers", "mteb"])
def test_the_releases_that_the_patches_are_tested_with_are_those_of_the_extra(extra):
    (wanted,) = map(Requirement, EXTRAS[extra])
    lines = (ROOT / "requirements" / "compat.txt").read_text().splitlines()
    pinned = [line.removeprefix(f"{wanted.name}==") for line in lines if line.startswith(f"{wanted.name}==")]
    assert pinned and all(wanted.specifier.contains(release) for release in pinned)
    (oldest,) = (part.version for part in wanted.specifier if part.operator == ">=")
    assert oldest in pinned
