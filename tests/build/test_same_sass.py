"""tools/same_sass.py: bodies are compared as a multiset, whatever the kernels are called."""

import pytest

from tests.support.programs import ROOT, python

TOOL = ROOT / "tools" / "same_sass.py"

LISTING = """
Fatbin elf code:
================
arch = {arch}

\tcode for sm_90
\t\tFunction : {name}
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   {instruction} ;      /* 0x00000a00ff017b82 */
        /*0010*/                   CALL.REL `({name}_part) ;
\t\t..........
"""


def kernel(name, instruction="LDC R1, c[0x0][0x28]", arch="sm_90a"):
    return LISTING.format(name=name, instruction=instruction, arch=arch)


def compare(folder, before, after, *options):
    (folder / "before.sass").write_text(before)
    (folder / "after.sass").write_text(after)
    return python(TOOL, folder / "before.sass", folder / "after.sass", *options)


def test_names_and_columns_do_not_matter(tmp_path):
    before = kernel("_Z3oldv") + kernel("_Z1x", "EXIT")
    run = compare(tmp_path, before, kernel("_Z1y", "  EXIT") + kernel("_Z3newv"))
    assert run.returncode == 0 and "2 kernels before, 2 after" in run.stdout, run.stdout


@pytest.mark.parametrize(
    "after",
    [
        kernel("_Z3newv", "LDC R1, c[0x0][0x30]"),
        kernel("_Z3newv", arch="sm_80"),
        kernel("_Z3newv") + kernel("_Z5twicev"),
    ],
    ids=["another instruction", "another architecture", "once more"],
)
def test_another_body_is_named(tmp_path, after):
    run = compare(tmp_path, kernel("_Z3oldv"), after)
    assert run.returncode == 1 and "before" in run.stdout and "_Z3newv" in run.stdout


def test_a_part_may_lack_kernels_but_have_no_new_one(tmp_path):
    whole = kernel("_Z3oldv") + kernel("_Z1x", "EXIT")
    assert compare(tmp_path, whole, kernel("_Z3newv")).returncode == 1
    assert compare(tmp_path, whole, kernel("_Z3newv"), "--part").returncode == 0
    assert compare(tmp_path, whole, kernel("_Z3newv", "NOP"), "--part").returncode == 1
