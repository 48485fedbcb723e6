"""tools/kernel_gains.py: what a call takes without a family of kernels."""

import json

import pytest

from tools import kernel_gains


def test_gains(tmp_path):
    """A family is needed by the shapes on which all others take over 1% longer."""
    times = [
        {"rows 152": 10.0, "rows 80": 12.0, "thin": 20.0, "wide": 40.0},
        {"rows 152": 10.0, "rows 80": 10.05, "thin": 30.0, "wide": 15.0},
        {"direct 8": 5.0},
    ]
    record = tmp_path / "plans.json"
    record.write_text(json.dumps([{"kind": "header"}, *({"variant": "plain", "times": t} for t in times)]))
    found = kernel_gains.gains(record)
    plain, older = found.loc["plain"], found.loc["plain, on a GPU without wgmma"]
    assert plain.loc["rows 152"].tolist() == [2, 1, pytest.approx((1.2 + 1.005) / 2), 1.2]
    assert plain.loc["thin"].tolist() == [2, 0, 1.0, 1.0]
    assert "rows 152" not in older.index and older.loc["thin"].tolist() == [2, 1, 1.5, 2.0]
    assert older.loc["wide"].tolist()[:2] == [2, 1]
