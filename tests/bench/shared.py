"""What tests of the bench share: a shape of a suite to measure on the CPU, and dry runs."""

import torch

from bench.command_line import main
from bench.harness import results
from bench.harness.measuring import Bench, Settings
from late_interaction._doctor import timing
from late_interaction._doctor.ceilings import Ceilings

CPU = torch.device("cpu")


def bench(suite, shape, *implementations, dtype=torch.bfloat16, limit_s=60, device=CPU):
    settings = Settings(device, dtype, implementations, timing.QUICK, Ceilings(), limit_s)
    return Bench(settings, suite, shape)


def dry_run(tmp_path, suites, impl="ours,einsum", *more):
    """The rows that a dry run of suites records."""
    out = tmp_path / "dry.json"
    assert main(["run", "--dry-run", "--suite", suites, "--impl", impl, "--out", str(out), *more]) == 0
    headers, rows = results.split(results.read(out))
    assert len(headers) == 1 and {"versions", "gpu", "driver", "commit", "command"} <= headers[0].keys()
    return rows
