"""What `make site` does to a page of docs/ before MkDocs renders it.

Links that leave docs/ lead to files of the repository. Such a file becomes a page under source/: Markdown as
it is, everything else as highlighted code. A line `<!-- include: PATH -->` is replaced by that file as code,
`<!-- include: PATH#Heading -->` by what stands below that heading of a Markdown file: a text has one source.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
INCLUDE = re.compile(r"^<!-- include: ([\w./-]+)(?:#([^\n]+?))? -->$", re.MULTILINE)
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LANGUAGES = {
    ".py": "python",
    ".cpp": "cpp",
    ".h": "cpp",
    ".cu": "cpp",
    ".cuh": "cpp",
    ".yml": "yaml",
    ".sh": "bash",
}
PICTURES = {".png", ".svg"}
WIDE = ("benchmarks/", "examples/", "source/")  # tables and programs take the room of the contents

SOURCES: dict[str, str] = {}  # a page of the site -> the repository's file that it shows


def place(name: str) -> str:
    """Where the site has a file of the repository."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"source/{name}" if Path(name).suffix in {".md", *PICTURES} else f"source/{name}.md"


def section(name: str, heading: str) -> str:
    parts = re.split(r"^## (.+)\n", (ROOT / name).read_text(), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    if heading not in found:
        raise PluginError(f"{name} has no heading '## {heading}': include one of {', '.join(found)}")
    return found[heading].strip("\n")


def code(name: str) -> str:
    if not (ROOT / name).is_file():
        raise PluginError(f"{name} is not a file of the repository")
    return f"````{LANGUAGES.get(Path(name).suffix, 'text')}\n{(ROOT / name).read_text().rstrip()}\n````"


def expanded(name: str, text: str) -> str:
    """The text of the repository's file `name` with its includes, and with links as the site has them."""

    def include(match: re.Match[str]) -> str:
        other, heading = match.groups()
        return linked(other, section(other, heading), name) if heading else code(other)

    parts = CODE.split(text)  # what stands in code is no link
    parts[::2] = [INCLUDE.sub(include, linked(name, part, name)) for part in parts[::2]]
    return "".join(parts)


def linked(written_in: str, text: str, shown_in: str) -> str:
    folder, here = os.path.dirname(written_in), os.path.dirname(place(shown_in))

    def link(match: re.Match[str]) -> str:
        target = normpath(f"{folder}/{match[2]}".lstrip("/"))
        if not (ROOT / target).is_file():
            return match[0]  # MkDocs says what it does not find
        return f"{match[1]}{relpath(place(target), here or '.')}{match[3] or ''})"

    return CODE.sub(lambda block: block[0], LINK.sub(link, text))


def targets(name: str, text: str) -> set[str]:
    """The files outside docs/ that a page links to, by their names in the repository."""
    bare = "".join(CODE.split(text)[::2])
    for other, heading in INCLUDE.findall(bare):
        bare += linked(other, section(other, heading), name) if heading else ""
    folder = os.path.dirname(name)
    found = {normpath(f"{folder}/{match[2]}".lstrip("/")) for match in LINK.finditer(bare)}
    return {x for x in found if (ROOT / x).is_file() and not x.startswith("docs/")}


def on_files(files: Files, *, config: Any) -> Files:
    """Adds a page for each file that pages link to, and for each that those link to."""
    SOURCES.clear()
    waiting = []
    for file in files.documentation_pages():
        SOURCES[file.src_uri] = f"docs/{file.src_uri}"
        waiting.append(SOURCES[file.src_uri])
    while waiting:
        name = waiting.pop()
        for target in targets(name, (ROOT / name).read_text()):
            if place(target) in files.src_uris:
                continue
            path = ROOT / target
            if path.suffix in PICTURES:
                file = File.generated(config, place(target), abs_src_path=str(path))
            elif path.suffix == ".md":
                file = File.generated(config, place(target), abs_src_path=str(path))
                waiting.append(target)
            else:
                file = File.generated(config, place(target), content=f"# {target}\n\n{code(target)}\n")
            SOURCES[file.src_uri] = target
            files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    name = SOURCES[page.file.src_uri]
    if page.file.src_uri.startswith(WIDE):
        page.meta["hide"] = ["toc"]
    return expanded(name, markdown) if name.endswith(".md") else markdown
