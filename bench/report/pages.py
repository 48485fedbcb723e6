"""Writes README.md and the pages of docs that hold figures, between their markers, from the records.

It draws the plots of bench/results, docs/large_batches.png and docs/end_to_end.png too. Nothing between the
markers is typed by hand: `python -m bench check` fails when a page and the records differ.
"""

import sys
from functools import partial

from bench.harness.results import SEPARATE_SUITES, WORK_RECORDS, read, records, whole_record
from bench.report import benchmarks, doctor, end_to_end, gpus, large_batches, performance, plots, readme
from bench.report.tables import load
from bench.rules import broken_rules

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
DEVICES = {  # a device's pages in docs/benchmarks -> the names of its records
    "h200": ("nvidia-h200",),
    "h100": ("nvidia-h100-80gb-hbm3",),
    "h200_as_8_0": ("nvidia-h200-planned-as-8-0",),
    "cpu": ("cpu", "cpu-intel-xeon-amx"),
}
KINDS = {"": benchmarks.build, "_steps": benchmarks.steps, "_roofline": performance.build}
PAGES = {
    "docs/architecture.md": gpus.build,
    "docs/doctor.md": doctor.build,
    "docs/large_batches.md": large_batches.build,
    **{
        f"docs/benchmarks/{page}{kind}.md": partial(build, device=names)
        for page, names in DEVICES.items()
        for kind, build in KINDS.items()
    },
}


def fill(text, generated):
    """`text` with what lies between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"it needs one {BEGIN} and, after it, one {END}")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{generated}\n{END}{after}"


def _draw(directory, docs):
    problems = []
    if path := whole_record(directory):
        problems.append(plots.roofline(load(path), directory / readme.PLOT))
    for path in sorted(directory.glob("sweep-*.json")):
        problems.append(plots.sweep(load(path), path.with_suffix(".png")))
    if docs.exists():
        modelled = ((r, large_batches.fitted(r)) for r in large_batches.recorded(directory))
        for record, device in [(r, device) for r, device in modelled if device][:1]:
            problems.append(plots.batches(record, device, docs / large_batches.PLOT))
        for steps in end_to_end.records(directory)[:1]:
            problems.append(plots.recipes(*steps, docs / end_to_end.PLOT))
    print("".join(f"{problem}\n" for problem in problems if problem), end="")


def _fill_pages(args, use):
    """Calls use(page, its text, its new text) for each page. Whether all went well."""
    pages = {args.readme: readme.build}
    pages |= {page: build for name, build in PAGES.items() if (page := args.readme.parent / name).exists()}
    good = True
    for page, build in pages.items():
        try:
            text = page.read_text()
            good &= use(page, text, fill(text, build(args.results)))
        except (OSError, ValueError) as error:
            print(f"{page}: {error}", file=sys.stderr)
            good = False
    return good


def write(args):
    """Draws the plots and writes the pages."""
    _draw(args.results, args.readme.parent / "docs")
    return int(not _fill_pages(args, lambda page, text, new: page.write_text(new) >= 0))


def check(args):
    """Changes nothing; 1 if a page would change or a record breaks a rule."""
    kinds = (*SEPARATE_SUITES, *WORK_RECORDS)
    more = [path for kind in kinds for path in sorted(args.results.glob(f"{kind}-*.json"))]
    paths = (*records(args.results), *more)
    broken = [f"{path.name}: {line}" for path in paths for line in broken_rules(read(path))]
    print("".join(f"{line}\n" for line in broken), end="", file=sys.stderr)

    def is_current(page, text, new):
        if text != new:
            print(f"{page} does not match {args.results}: run python -m bench report", file=sys.stderr)
        return text == new

    return int(not _fill_pages(args, is_current) or bool(broken))
