"""Known-item pairs from the docstrings of the Python standard library: real text, nothing to download.

The first sentence of a docstring is the query, the rest of it is the document to find: the two
were written by one person about one thing, and share few sentences with any other pair.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

# Modules that import fast, everywhere and without side effects, and whose docstrings are prose.
# fmt: off
MODULES = [
    "argparse", "asyncio", "base64", "bdb", "bisect", "builtins", "calendar", "cmd", "codecs", "collections",
    "concurrent.futures", "configparser", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal",
    "difflib", "email.message", "enum", "fractions", "ftplib", "functools", "gzip", "heapq", "http.client",
    "http.cookiejar", "imaplib", "importlib.resources", "inspect", "io", "ipaddress", "itertools", "json",
    "logging", "lzma", "math", "mimetypes", "numbers", "operator", "os", "os.path", "pathlib", "pickle",
    "pkgutil", "pprint", "queue", "random", "re", "sched", "selectors", "shelve", "shlex", "shutil",
    "smtplib", "socket", "socketserver", "sqlite3", "ssl", "statistics", "string", "subprocess", "sys",
    "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "traceback", "unittest",
    "urllib.parse", "urllib.request", "uuid", "warnings", "weakref", "xml.etree.ElementTree", "zipfile",
]
# fmt: on

MIN_QUERY_WORDS = 4
MIN_DOCUMENT_WORDS = 12

# A sentence ends at . ! or ? before white space, unless that dot closes an abbreviation or an initial.
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\betc)(?<!\bcf)(?<!\b[A-Z])[.!?](?=\s)")
# Old C docstrings open with a signature ("range(stop) -> range object") in place of a sentence.
_SIGNATURE = re.compile(r"^[\w.]+\(|->|>>>")


@dataclass(frozen=True)
class Pair:
    """One known item: a query, the document that answers it, and the object both describe."""

    name: str
    query: str
    document: str


def split_docstring(docstring: str) -> tuple[str, str]:
    """Split a docstring into its first sentence and the rest, white space collapsed.

    A blank line ends the first sentence too, since many summary lines carry no full stop.

    >>> split_docstring("Return x, i.e. the value.  Never\\n    negative.")
    ('Return x, i.e. the value.', 'Never negative.')
    >>> split_docstring("Open a file\\n\\n    The mode is optional.")
    ('Open a file', 'The mode is optional.')
    """
    text = inspect.cleandoc(docstring)
    first, _, rest = text.partition("\n\n")
    if end := _SENTENCE_END.search(first):
        first, rest = first[: end.end()], first[end.end() :] + " " + rest
    return " ".join(first.split()), " ".join(rest.split())


def build_pairs(modules: Iterable[str] = MODULES) -> list[Pair]:
    """The known-item pairs of `modules`, in their order, each query and each document only once.

    Modules that this Python does not have are passed over. Raises ValueError if no pair is found.
    """
    pairs: list[Pair] = []
    queries: set[str] = set()
    documents: set[str] = set()
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for path, docstring in _docstrings(module):
            query, document = split_docstring(docstring)
            if _SIGNATURE.search(query):
                continue
            if len(query.split()) < MIN_QUERY_WORDS or len(document.split()) < MIN_DOCUMENT_WORDS:
                continue
            if query in queries or document in documents:
                continue  # inherited or copied docstrings: the item to find would not be unique
            queries.add(query)
            documents.add(document)
            pairs.append(Pair(path, query, document))
    if not pairs:
        raise ValueError("no docstrings found: was Python started with -OO, which strips them?")
    return pairs


def _docstrings(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of the public functions, classes and methods of a module, by name."""
    for name in _public(dir(module)):  # dir, not vars: some modules load their names when asked
        member = getattr(module, name)
        path = f"{module.__name__}.{name}"
        if not _belongs_to(module, member):
            continue
        if isinstance(member, type):
            yield path, _own_doc(member)
            for method_name in _public(vars(member)):
                method = vars(member)[method_name]
                if (inspect.isroutine(method) or isinstance(method, property)) and _belongs_to(
                    module, method
                ):
                    yield f"{path}.{method_name}", _own_doc(method)
        elif inspect.isroutine(member):
            yield path, _own_doc(member)


def _public(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_"))


def _belongs_to(module: ModuleType, member: object) -> bool:
    """Not so if another listed module owns `member` (csv.StringIO), or a library has added it to this one."""
    home = (getattr(member, "__module__", None) or module.__name__).partition(".")[0]
    owner = home.lstrip("_")  # _io, the C half of io, counts as io
    if owner == module.__name__.partition(".")[0]:
        return True
    return home in sys.stdlib_module_names and owner not in _TOP_LEVEL


def _own_doc(thing: object) -> str:
    doc = getattr(thing, "__doc__", None)
    return doc if isinstance(doc, str) else ""


_TOP_LEVEL = frozenset(name.partition(".")[0] for name in MODULES)
