"""`python -m bench COMMAND`: measures late_interaction beside other MaxSim libraries, and reports it.

A record is a JSON file of bench/results: what one device measured, and with which versions. `run`,
`sweep` and `plans` measure and write records, `merge` adds to them, and `report` makes the pages from the
records. Start with

    python -m bench run --quick        # every suite, fewer repetitions
    python -m bench run --dry-run      # the same code in tiny shapes, without a GPU
"""

from __future__ import annotations

import argparse
import gc
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bench import rules
from bench.harness import results, run_header
from bench.suites import end_to_end, run, sentence_transformers, sweep
from bench.tuning import (
    engines,
    first_pass,
    muvera,
    ncu,
    plans,
    pooling,
    shards,
    single_vectors,
    streaming,
    vllm_step,
    weak_scaling,
)

Arguments = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Command:
    about: str  # what it does
    cost: str  # how long it takes, and what it needs
    add_arguments: Arguments
    run: Callable[[argparse.Namespace], int]
    details: str | None = None  # the text of its --help
    epilog: str | None = None


def _report_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--readme", type=Path, default=results.ROOT / "README.md", help="docs/ lies beside it")
    p.add_argument("--results", type=Path, default=results.DIRECTORY, help="the folder of records")


def _report(name: str) -> Callable[[argparse.Namespace], int]:
    """A machine that measures has no pandas: it is imported where pages are made."""
    return lambda args: int(getattr(import_module("bench.report.pages"), name)(args))


# Times are of one H200; compiling the Triton peers' kernels takes most of them.
COMMANDS: dict[str, Command] = {
    "run": Command(
        "time the suites: forward, training, varlen, PLAID, ... beside the peers that are installed",
        "half an hour on a GPU; a few minutes on a CPU, where the CPU suite runs",
        run.add_arguments, run.run, run.__doc__, run.LISTS,
    ),
    "sweep": Command(
        "time the bf16 forward on 300 random shapes beside the peers, and list where it loses",
        "7 minutes with the peers; needs a GPU", sweep.add_arguments, sweep.run, sweep.__doc__,
    ),
    "plans": Command(
        "time every plan that the planner could choose, and say what its choices cost",
        "3 minutes; needs a GPU", plans.add_arguments, plans.run, plans.__doc__,
    ),
    "st": Command(
        "time Sentence Transformers' losses and retrieval evaluation with and without the patch",
        "ten minutes on a GPU, two on a CPU; needs sentence-transformers",
        sentence_transformers.add_arguments, sentence_transformers.run, sentence_transformers.__doc__,
    ),
    "merge": Command(
        "merge the files of `run --out` into the records of bench/results", "a second; needs no GPU",
        results.add_arguments, lambda args: results.merge(args, rules.broken_rules), results.merge.__doc__,
    ),
    "end-to-end": Command(
        "time training steps of three recipes, encoder included, with each library's MaxSim in the loss",
        "4 minutes; needs a GPU, transformers and peft",
        end_to_end.add_arguments, end_to_end.run, end_to_end.__doc__,
    ),
    "ncu": Command(
        "run a few forwards for Nsight Compute, or read the profile that it wrote",
        "a minute; needs a GPU and ncu", ncu.add_arguments, ncu.run, ncu.__doc__,
    ),
    "engines": Command(
        "build, search and rate the indexes of other engines beside exact searches, on real text",
        "half an hour for 10,000 documents on two cores; needs requirements/engines.txt",
        engines.add_arguments, engines.run, engines.__doc__,
    ),
    "first-pass": Command(
        "time first passes over 1-bit and 4-bit codes beside exact scores, and count what they find",
        "seconds; a minute with --demo, which needs what `make demo` needs",
        first_pass.add_arguments, first_pass.run, first_pass.__doc__,
    ),
    "muvera": Command(
        "count what MUVERA's encodings find beside an exact search, and time how they are made",
        "two minutes; a minute with --demo, which needs what `make demo` needs",
        muvera.add_arguments, muvera.run, muvera.__doc__,
    ),
    "pooling": Command(
        "time Ward and k-means pooling of documents, beside scipy's clustering where it is installed",
        "seconds on a GPU; a minute on a CPU with --documents 50",
        pooling.add_arguments, pooling.run, pooling.__doc__,
    ),
    "shards": Command(
        "time a search by the processes of torchrun, a shard each, beside one process with all documents",
        "a minute; one GPU a process", shards.add_arguments, shards.run, shards.__doc__,
    ),
    "weak-scaling": Command(
        "time a contrastive step by the processes of torchrun, a share of the batch each, beside one process",
        "a minute; one GPU a process",
        weak_scaling.add_arguments, weak_scaling.run, weak_scaling.__doc__,
    ),
    "single-vectors": Command(
        "time a contrastive step of single vectors by the processes of torchrun, beside cuBLAS' own rate",
        "two minutes; one GPU a process",
        single_vectors.add_arguments, single_vectors.run, single_vectors.__doc__,
    ),
    "stream-layers": Command(
        "time training steps of a decoder whose layers stream, and count their memory, beside checkpoints",
        "a minute; needs a GPU, transformers and, for adapters, peft",
        streaming.add_arguments, streaming.run, streaming.__doc__,
    ),
    "vllm-step": Command(
        "time the scoring of a step of vLLM's server, by its own kernel and with the patch",
        "a minute; needs a GPU, triton and the files of a wheel of vLLM",
        vllm_step.add_arguments, vllm_step.run, vllm_step.__doc__,
    ),
    "report": Command(
        "write the plots, README.md and docs/{architecture,doctor,large_batches}.md and docs/benchmarks/*.md",
        "seconds; needs pandas, tabulate and, for the plots, matplotlib", _report_arguments, _report("write"),
    ),
    "check": Command(
        "fail if a page differs from the records, or a record breaks the rules of bench/rules.py",
        "seconds; needs pandas and tabulate", _report_arguments, _report("check"),
    ),
}  # fmt: skip


def _overview() -> str:
    lines = ["commands (`python -m bench COMMAND --help` has the options):"]
    for name, command in COMMANDS.items():
        about = textwrap.fill(command.about, 100, initial_indent=f"  {name:13}", subsequent_indent=15 * " ")
        lines += [about, f"{'':15}[{command.cost}]"]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, epilog=_overview(), formatter_class=raw
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        details = command.details or f"{command.about[0].upper()}{command.about[1:]}."
        command.add_arguments(commands.add_parser(
            name, description=f"{details.strip()}\n\n{command.cost[0].upper()}{command.cost[1:]}.",
            epilog=command.epilog, formatter_class=raw,
        ))  # fmt: skip
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else [*arguments]
    args = parser().parse_args(arguments)
    args.arguments = arguments  # which the header of a record repeats
    run_header.plan_as(getattr(args, "capability", None))
    gc.freeze()  # a collection before each measurement would walk through all that is imported
    return COMMANDS[args.command].run(args)
