"""The table of a corpus of codes, in documents of different lengths and of one."""

from __future__ import annotations

import pandas as pd

from bench.report.tables import Record, markdown, section
from bench.suites.codes import BF16, RAGGED_KINDS
from late_interaction._doctor.text import number


def section_of(record: Record) -> list[str]:
    """Packed documents in bf16 and as codes."""
    rows = record.of("ragged-codes")
    if rows.empty:
        return []
    table, body = rows.pivot(index="shape", columns="variant", values="gpu_us"), []
    for shape, found in table.iterrows():
        for lengths, ending in (("different", ", ragged"), ("equal", ", equal")):
            each = {kind: found[kind + ending] for kind in RAGGED_KINDS}
            cells = {kind: f"{number(us)} ({us / each[BF16]:.2f}x)" for kind, us in each.items()}
            body.append({"shape": shape, "lengths": lengths, **cells})
    note = (
        "GPU microseconds of packed documents, of different lengths (20 to 400 tokens) or of their mean, and"
        " over bf16."
    )
    return section("A corpus of codes", note, markdown(pd.DataFrame(body), 2))
