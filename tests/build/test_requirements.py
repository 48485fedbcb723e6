"""The pinned requirements are releases that the extras of pyproject.toml allow."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(name):
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if re.match(r"[a-z]", line)]
    return {
        pin.name: str(pin.specifier).removeprefix("==")
        for pin in found
        if not pin.marker or pin.marker.evaluate()
    }


@pytest.mark.parametrize("extra", ["bench", "dev", "demo"])
def test_every_requirement_of_an_extra_is_pinned_within_its_range(extra):
    pinned = pins("build") | pins(extra)
    for wanted in map(Requirement, PROJECT["project"]["optional-dependencies"][extra]):
        assert wanted.name in pinned, wanted
        assert wanted.specifier.contains(pinned[wanted.name]), wanted


def test_what_builds_the_package_is_pinned_too():
    pinned = pins("build")
    for wanted in map(Requirement, PROJECT["build-system"]["requires"]):
        assert wanted.specifier.contains(pinned[wanted.name]), wanted


@pytest.mark.parametrize(
    ("extra", "environment"), [("arrow", "lancedb"), ("lancedb", "lancedb"), ("ray", "ray")]
)
def test_what_make_lancedb_and_make_ray_install_is_what_the_extra_allows(extra, environment):
    pinned = pins(environment)
    for wanted in map(Requirement, PROJECT["project"]["optional-dependencies"][extra]):
        assert wanted.specifier.contains(pinned[wanted.name]), wanted


@pytest.mark.parametrize("extra", ["pylate", "colpali", "sentence-transformers", "mteb"])
def test_the_releases_that_the_patches_are_tested_with_are_those_of_the_extra(extra):
    (wanted,) = map(Requirement, PROJECT["project"]["optional-dependencies"][extra])
    lines = (ROOT / "requirements" / "compat.txt").read_text().splitlines()
    pinned = [line.removeprefix(f"{wanted.name}==") for line in lines if line.startswith(f"{wanted.name}==")]
    assert pinned and all(wanted.specifier.contains(release) for release in pinned)
    (oldest,) = (part.version for part in wanted.specifier if part.operator == ">=")
    assert oldest in pinned
