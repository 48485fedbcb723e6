"""tools/st_own_tests.py: what it reads from pytest's reports, and which tests it calls broken."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "tools" / "st_own_tests.py"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_one"/>
<testcase classname="tests.a" name="test_two[x]"><failure>no</failure></testcase>
<testcase classname="tests.a" name="test_three"><skipped/></testcase>
<testcase classname="tests.a" name="test_four"><error>no</error></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("st_own_tests", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_report(tool, tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert tool.read(tmp_path / "report.xml") == {
        "tests.a::test_one": "passed",
        "tests.a::test_two[x]": "failed",
        "tests.a::test_three": "skipped",
        "tests.a::test_four": "failed",
    }


def test_what_is_broken(tool):
    expected = next(iter(tool.EXPECTED))
    without = dict.fromkeys(["t::kept", "t::lost", "t::gone", f"t::{expected}[x]"], "passed") | {
        "t::no": "failed"
    }
    patched = {"t::kept": "passed", "t::lost": "failed", f"t::{expected}[x]": "failed", "t::no": "failed"}
    assert tool.broken(without, patched) == ["t::lost", "t::gone"]
