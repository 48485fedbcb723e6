"""`python -m bench COMMAND`: measures late_interaction beside other MaxSim libraries, and reports it.

A record is a JSON file of bench/results: what one device measured, and with which versions. `run`,
`sweep` and `plans` measure and write records, `merge` adds to them, and `report` makes the pages from the
records. Start with

    python -m bench run --quick        # every suite, fewer repetitions
    python -m bench run --dry-run      # the same code in tiny shapes, without a GPU
"""

import argparse
import gc
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from bench import rules
from bench.harness import results, run_header

Arguments = Callable[[argparse.ArgumentParser], None]


class Command(NamedTuple):
    about: str  # what it does
    cost: str  # how long it takes, and what it needs
    add_arguments: Arguments
    run: Callable[[argparse.Namespace], int]
    details: str | None = None  # the text of its --help
    epilog: str | None = None


def _of(name, cost):
    """The command that a module is, whose text is that of --help and its first line what it does."""
    module = import_module(f"bench.{name}")
    about, epilog = module.__doc__.partition("\n")[0].rstrip("."), getattr(module, "LISTS", None)
    return Command(about, cost, module.add_arguments, module.run, module.__doc__, epilog)


def _shown(name, cost):
    """A command whose record is shown at the end as a page shows it, where pandas is installed."""
    command = _of(name, cost)

    def run(args):
        status = command.run(args)
        if find_spec("pandas"):
            show = getattr(import_module("bench.report.own_records"), args.command)
            print("\n\n".join(show(args.out)))
        return status

    return command._replace(run=run)


def _report_arguments(p):
    p.add_argument("--readme", type=Path, default=results.ROOT / "README.md", help="docs/ lies beside it")
    p.add_argument("--results", type=Path, default=results.DIRECTORY, help="the folder of records")


def _report(name):
    """A machine that measures has no pandas: it is imported where pages are made."""
    return lambda args: int(getattr(import_module("bench.report.pages"), name)(args))


# Times are of one H200; compiling the Triton peers' kernels takes most of them.
COMMANDS = {
    "run": _of("suites.run", "half an hour on a GPU; a few minutes on a CPU, where the CPU suite runs"),
    "sweep": _shown("suites.sweep", "7 minutes with the peers; needs a GPU"),
    "plans": _shown("tuning.plans", "3 minutes; needs a GPU"),
    "st": _of(
        "suites.sentence_transformers", "ten minutes on a GPU, two on a CPU; needs sentence-transformers"
    ),
    "merge": Command(
        "Merge the files of `run --out` into the records of bench/results", "a second; needs no GPU",
        results.add_arguments, lambda args: results.merge(args, rules.broken_rules), results.merge.__doc__,
    ),
    "end-to-end": _of("suites.end_to_end", "4 minutes; needs a GPU, transformers and peft"),
    "ncu": _of("tuning.ncu", "a minute; needs a GPU and ncu"),
    "engines": _of(
        "tuning.engines", "half an hour for 10,000 documents on two cores; needs requirements/engines.txt"
    ),
    "passages": _of("tuning.passages", "half a minute on an H200"),
    "first-pass": _of("tuning.first_pass", "seconds; --demo takes a minute and what `make demo` needs"),
    "muvera": _of("tuning.muvera", "two minutes; --demo takes one and what `make demo` needs"),
    "pooling": _of("tuning.pooling", "seconds on a GPU; a minute on a CPU with --documents 50"),
    "shards": _of("tuning.shards", "a minute; one GPU a process"),
    "weak-scaling": _of("tuning.weak_scaling", "a minute; one GPU a process"),
    "single-vectors": _of("tuning.single_vectors", "two minutes; one GPU a process"),
    "stream-layers": _of("tuning.streaming", "a minute; needs a GPU, transformers and, for adapters, peft"),
    "vllm-step": _of("tuning.vllm_step", "a minute; needs a GPU, triton and the files of a wheel of vLLM"),
    "report": Command(
        "Write the plots, README.md and docs/{architecture,doctor,large_batches}.md and docs/benchmarks/*.md",
        "seconds; needs pandas, tabulate and, for the plots, matplotlib", _report_arguments, _report("write"),
    ),
    "check": Command(
        "Fail if a page differs from the records, or a record breaks the rules of bench/rules.py",
        "seconds; needs pandas and tabulate", _report_arguments, _report("check"),
    ),
}  # fmt: skip


def _overview():
    lines = ["commands (`python -m bench COMMAND --help` has the options):"]
    for name, command in COMMANDS.items():
        about = textwrap.fill(command.about, 100, initial_indent=f"  {name:13}", subsequent_indent=15 * " ")
        lines += [about, f"{'':15}[{command.cost}]"]
    return "\n".join(lines)


def parser():
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, epilog=_overview(), formatter_class=raw
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        details = command.details or f"{command.about}."
        command.add_arguments(commands.add_parser(
            name, description=f"{details.strip()}\n\n{command.cost[0].upper()}{command.cost[1:]}.",
            epilog=command.epilog, formatter_class=raw,
        ))  # fmt: skip
    return top


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else [*arguments]
    args = parser().parse_args(arguments)
    args.arguments = arguments  # which the header of a record repeats
    run_header.plan_as(getattr(args, "capability", None))
    gc.freeze()  # a collection before each measurement would walk through all that is imported
    return COMMANDS[args.command].run(args)
