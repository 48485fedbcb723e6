"""The generated part of docs/architecture.md: each GPU's rates, and the forward that it gets for a few calls.

The planner says it of any GPU, so no record and no GPU is needed.
"""

import re
from typing import NamedTuple

import pandas as pd
import torch

import late_interaction as li
from bench.report.tables import markdown
from late_interaction._doctor.machine import planned_rates


class _Gpu(NamedTuple):
    name: str
    sm: int
    sm_count: int
    geforce: bool = False


# Multiprocessors are those of NVIDIA's data sheets and white papers.
_GPUS = (
    _Gpu("H200", 90, 132), _Gpu("A100", 80, 108), _Gpu("A10", 86, 72), _Gpu("RTX 3090", 86, 82, True),
    _Gpu("L4", 89, 58), _Gpu("L40S", 89, 142), _Gpu("RTX 4090", 89, 128, True), _Gpu("B200", 100, 148),
    _Gpu("RTX PRO 6000", 120, 188), _Gpu("RTX 5090", 120, 170, True), _Gpu("GB10", 121, 48),
    _Gpu("T4", 75, 40),
)  # fmt: skip
_BF16, _FP32 = torch.bfloat16, torch.float32
_CALLS = (
    ("one query, 1,000 documents of 300", (1, 32, 128), (1000, 300, 128), _BF16),
    ("one query, 20,000 documents of 24", (1, 16, 128), (20_000, 24, 128), _BF16),
    ("a page of 1,024 with 1,000 pages", (1, 1024, 128), (1000, 1024, 128), _BF16),
    ("16 queries, 100,000 documents of 128", (16, 32, 128), (100_000, 128, 128), _BF16),
    ("batch of 32, 32 and 300 tokens", (32, 32, 128), (32, 300, 128), _BF16),
    ("batch of 256, 32 and 300 tokens", (256, 32, 128), (256, 300, 128), _BF16),
    ("64 queries of 16, 4,096 documents of 24", (64, 16, 128), (4096, 24, 128), _BF16),
    ("128 queries, 8 documents of 1,030 each", (128, 32, 128), (128, 8, 1030, 128), _BF16),
    ("batch of 64, 768 dims", (64, 32, 768), (64, 300, 768), _BF16),
    ("batch of 256, float32", (256, 32, 128), (256, 300, 128), _FP32),
)


def _rates(gpu):
    """Write what the planner says of fp16 and bf16, int8, fp8, TF32 and FFMA."""
    rates = planned_rates(sm=gpu.sm, sm_count=gpu.sm_count, geforce=gpu.geforce)
    return [str(rate or "-") for rate in rates.values()]


def _plan(gpu, q, d, dtype):
    of = {"sm": gpu.sm, "sm_count": gpu.sm_count, "geforce": gpu.geforce}
    text = li.explain_plan(q, d, dtype=dtype, precision="highest", winners=False, **of)
    kernel = re.search(r"maxsim_forward_(\w+)", text)
    tile = re.search(r"(\d+) query rows x (\d+) document tokens", text)
    by = " by FFMA" if "products in fp32" in text else ""
    return f"`{kernel[1]}` {tile[1]} x {tile[2]}{by}"


def build(results):  # the folder of records, which other pages are made from
    del results
    named = [f"{gpu.name}, {gpu.sm / 10}" for gpu in _GPUS]
    head = ["GPU", "multiprocessors", "fp16, bf16", "int8", "fp8", "TF32", "FFMA"]
    of_gpus = [[name, str(gpu.sm_count), *_rates(gpu)] for name, gpu in zip(named, _GPUS, strict=True)]
    rows = [[what, *(_plan(gpu, q, d, dtype) for gpu in _GPUS)] for what, q, d, dtype in _CALLS]
    tables = pd.DataFrame(of_gpus, columns=head), pd.DataFrame(rows, columns=["call", *named])
    return f"{markdown(tables[0])}\n\n{markdown(tables[1], left=len(named) + 1)}"
