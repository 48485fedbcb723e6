"""How tools/mutate_python.py runs tests on many versions of a module without importing PyTorch for each.

A process collects the tests once and forks for each mutant. In the fork, the functions that the mutant
changes get their new code (``function.__code__``), wherever they were imported to, and the tests run that
execute a changed line. This is not enough for a statement that runs while the package is imported, or while
tests are collected: for these `run_chosen` collects tests anew, with the mutant on disk.
"""

import gc
import importlib
import inspect
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from types import CodeType, FunctionType

import pytest

PASSED, FAILED, BROKEN, TOO_LONG = 0, 1, 2, None
OPTIONS = ["-q", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
# A mutant of a limit may ask for any amount of memory. Beyond this an allocation fails in the fork, which is
# killed by its own test then and not, with this program, by the system.
MORE_MEMORY = 8 << 30
# Seconds that the variants of a test function take together which are run as if they were one.
VARIANTS_AS_ONE = 0.1


# ---- forks ----


def fork(work, limit, log):
    """What `work` returns in a fork of this process, an exit status; TOO_LONG after `limit` seconds."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = BROKEN
        try:
            os.setsid()
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            status = int(work())
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)  # pytest may have taken the place of sys.stderr
        finally:
            os._exit(status)
    handle = os.pidfd_open(child)
    ended, _, _ = select.select([handle], [], [], limit)
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.close(handle)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if ended else TOO_LONG


def limit_memory():
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY, hard))


# ---- which tests execute which lines ----


class Lines:
    """Collects (file, line) of what is executed in some files, by Python or by torch.compile, which reads
    bytecode instead of running it."""

    def __init__(self, files):
        # Not imported with this file: PyTorch reads the number of threads from the environment, set later.
        from torch._dynamo.symbolic_convert import InstructionTranslatorBase

        self.files, self.seen = set(map(str, files)), set()
        self.translator, self.starts_line = InstructionTranslatorBase, InstructionTranslatorBase.starts_line

    def __enter__(self):
        threading.settrace(self._called)
        sys.settrace(self._called)

        def starts_line(translator, number):
            if translator.f_code.co_filename in self.files:
                self.seen.add((translator.f_code.co_filename, number))
            self.starts_line(translator, number)

        self.translator.starts_line = starts_line
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        threading.settrace(None)
        self.translator.starts_line = self.starts_line

    def by_file(self):
        return {name: sorted(line for file, line in self.seen if file == name) for name, _ in self.seen}

    def _called(self, frame, _event, _argument):
        return self._executed if frame.f_code.co_filename in self.files else None

    def _executed(self, frame, event, _argument):
        if event == "line":
            self.seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._executed


def fastest_first(tests, likely=()):
    """Test ids, of {id: seconds}: those that failed on a mutant of the same line come before all."""
    return sorted(tests, key=lambda test: (test not in likely, tests[test]))


def one_of_each_first(tests):
    """One variant of every test function, the fastest first, then a second variant, and so on. Variants that
    take a tenth of a second together count as one."""
    rank, seen, taken = {}, {}, {}
    for test in sorted(tests, key=tests.get):
        function = test.partition("[")[0]
        taken[function] = taken.get(function, 0.0) + tests[test]
        if function not in seen or taken[function] > VARIANTS_AS_ONE:
            seen[function] = seen.get(function, -1) + 1
        rank[test] = seen[function]
    return sorted(tests, key=lambda test: (rank[test], tests[test]))


def within(tests, order, seconds):
    """The first of `order` that take so long together, and at least one."""
    chosen, total = [], 0.0
    for test in order:
        total += tests[test]
        if chosen and total > seconds:
            break
        chosen.append(test)
    return chosen


# ---- what a mutant changes ----


def _own(code):
    """What code does itself, without the functions that are defined in it."""
    constants = [(type(c), repr(c)) for c in code.co_consts if not isinstance(c, CodeType)]
    signature = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return code.co_name, code.co_code, code.co_names, code.co_varnames, constants, signature


def _inner(code):
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _is_function(code):
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def changed_functions(before, after):
    """Pairs of code of functions that differ, the outer ones first. None if something else differs: a
    statement of a module or class, a default of an argument."""
    inner = list(zip(_inner(before), _inner(after), strict=False))
    same = _own(before) == _own(after) and len(_inner(before)) == len(_inner(after))
    if not same and not _is_function(before):
        return None
    found = [changed_functions(*pair) for pair in inner] if len(_inner(before)) == len(_inner(after)) else []
    if None in found:
        return None
    pairs = [pair for pairs in found for pair in pairs]
    return [(before, after), *pairs] if _is_function(before) and (pairs or not same) else pairs


class Functions:
    """The functions of a file, wherever they are referred to."""

    def __init__(self, file, source):
        self.file, self.code = str(file), compile(source, str(file), "exec", dont_inherit=True)
        # tests/conftest.py freezes what was collected, and gc.get_objects() does not list what is frozen.
        frozen = gc.get_freeze_count()
        gc.unfreeze()
        self.live = [
            f for f in gc.get_objects() if type(f) is FunctionType and f.__code__.co_filename == self.file
        ]
        if frozen:
            gc.freeze()

    def replacements(self, mutated):
        """[(function, new code)], or None where replacing functions does not make the mutant."""
        pairs = changed_functions(self.code, compile(mutated, self.file, "exec", dont_inherit=True))
        if not pairs:
            return None
        found = [(f, after) for before, after in pairs for f in self.live if f.__code__ == before]
        return found or None


# ---- sessions of pytest ----


class _Session:
    """A pytest plugin: `work(session)` takes the place of running all tests that were collected."""

    def __init__(self, work):
        self.work, self.failed = work, False

    def pytest_runtestloop(self, session):
        if session.testsfailed:  # a test file does not import
            self.failed = True
        else:
            self.work(self, session)
        return True

    def pytest_runtest_logreport(self, report):
        self.failed |= report.failed

    def run(self, session, names):
        """The first of the named tests that fails, or None."""
        items = {item.nodeid: item for item in session.items}
        if missing := [name for name in names if name not in items]:
            return missing[0]
        for name, following in zip(names, [*names[1:], None], strict=True):
            items[name].config.hook.pytest_runtest_protocol(item=items[name], nextitem=items.get(following))
            if self.failed:
                return name
        return None


def _pytest(tree, files, plugin):
    os.chdir(tree)
    return pytest.main([*OPTIONS, *files], plugins=[plugin])


def run_chosen(tree, names):
    """Collects the files of the named tests, and runs these until one fails. For a fork."""

    def work(plugin, session):
        plugin.run(session, names)

    limit_memory()
    plugin = _Session(work)
    broken = _pytest(tree, list(dict.fromkeys(name.partition("::")[0] for name in names)), plugin)
    return FAILED if plugin.failed else int(broken)


class Collected:
    """Tests that were collected, in the process that forks for every mutant."""

    def __init__(self, plugin, session, log):
        self.plugin, self.session, self.log = plugin, session, log
        session.config._tmp_path_factory.getbasetemp()

    def record(self, files, path, test_file):
        """Runs the tests of a file, in a fork. Writes {test: [seconds, {file: lines that it executes}]}."""
        items = [item for item in self.session.items if item.nodeid.startswith(f"{test_file}::")]

        def work():
            limit_memory()
            found = {}
            for item in items:
                began = time.monotonic()
                with Lines(files) as lines:
                    if self.plugin.run(self.session, [item.nodeid]):
                        return FAILED
                found[item.nodeid] = time.monotonic() - began, lines.by_file()
            path.write_text(json.dumps(found))
            return PASSED

        return fork(work, 3600, self.log)

    def run_on(self, replacements, names, limit):
        """(status, the test that failed) of a mutant."""
        first = self.log.with_suffix(".failed")

        def work():
            limit_memory()
            for function, code in replacements:
                function.__code__ = code
            failed = self.plugin.run(self.session, names)
            first.write_text(failed or "")
            return FAILED if failed else PASSED

        first.unlink(missing_ok=True)
        status = fork(work, limit, self.log)
        return status, first.read_text() if first.exists() else ""


def collect(tree, tests, modules, log, work):
    """Collects tests in a fork, and calls work(Collected, {file: lines executed meanwhile}) there."""

    def in_fork():
        lines = Lines(tree / "late_interaction" / module for module in modules)

        def loop(plugin, session):
            for module in modules:  # tests may import it later
                importlib.import_module(f"late_interaction.{module.removesuffix('.py').replace('/', '.')}")
            lines.__exit__()
            work(Collected(plugin, session, log), lines.by_file())

        plugin = _Session(loop)
        with lines:
            status = _pytest(tree, tests, plugin)
        return FAILED if plugin.failed else int(status)

    return fork(in_fork, None, log.with_suffix(".collected"))
