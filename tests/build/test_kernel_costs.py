"""tools/kernel_costs.py: which family a kernel belongs to, and what a call takes without one."""

import importlib.util
import json
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "kernel_costs.py"


@pytest.fixture(scope="module")
def costs():
    spec = importlib.util.spec_from_file_location("kernel_costs", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        (
            "void maxsim_forward_sm90_q<Sm90QTile<ptx::WgmmaBf16, __nv_bfloat16, 104, 1, false> >(A)",
            "rows 104",
        ),
        ("void maxsim_forward_sm90_q<Sm90QTile<ptx::WgmmaInt8, signed char, 80, 2> >(A)", "rows 80, 8 bit"),
        ("void maxsim_forward_sm90_q_longd<Sm90QLongDTile<ptx::WgmmaTf32, float, 80> >(A)", "split 80"),
        (
            "void maxsim_forward_sm90_q_short<Sm90QShortTile<ptx::WgmmaFp16, __half, 24, 6, 8, true> >(A)",
            "short 24x6",
        ),
        ("void maxsim_forward_sm80<ptx::MmaTf32, MmaTile<4, 2, 4, 6, 1>, true>(A)", "wide"),
        (
            "void maxsim_forward_sm80<ptx::MmaTf32, Listed<MmaTile<1, 4, 2, 4, 3> >, true>(A)",
            "mma, listed pairs",
        ),
        ("void backward_lowmem<double, 1, true, false, BackwardArgs>(BackwardArgs)", "backward_lowmem, fp64"),
        ("find_runs(int const*, long)", "find_runs"),
    ],
)
def test_family(costs, kernel, family):
    assert costs.family(kernel) == family


def test_gains(costs, tmp_path):
    """A family is needed by the shapes on which all others take over 1% longer."""
    times = [
        {"rows 152": 10.0, "rows 80": 12.0, "thin": 20.0, "wide": 40.0},
        {"rows 152": 10.0, "rows 80": 10.05, "thin": 30.0, "wide": 15.0},
        {"direct 8": 5.0},
    ]
    record = tmp_path / "plans.json"
    record.write_text(json.dumps([{"kind": "header"}, *({"variant": "plain", "times": t} for t in times)]))
    found = costs.gains(record)
    assert found["plain"]["rows 152"] == (2, 1, pytest.approx((1.2 + 1.005) / 2), 1.2)
    assert found["plain"]["thin"] == (2, 0, 1.0, 1.0)
    older = found["plain, on a GPU without wgmma"]
    assert "rows 152" not in older and older["thin"] == (2, 1, 1.5, 2.0) and older["wide"][:2] == (2, 1)
