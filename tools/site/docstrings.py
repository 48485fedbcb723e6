"""The package's docstrings as Markdown, for the API pages of `make site` (an extension of griffe).

They are written for `help()`: with roles of reStructuredText, `::` before code, and sections named Example.
A role becomes a link where an API page documents its target, else code.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe

PAGES = Path(__file__).resolve().parents[2] / "docs" / "api"
ENTRY = re.compile(r"\s*\*{0,2}[A-Za-z_][\w., *]*: ")
ROLE = re.compile(r":(?:func|class|mod|meth|attr|data|exc):`~?([\w.]+)`")


@cache
def documented() -> dict[str, str]:
    """The names on the API pages, by themselves and by their last parts, which are the first page's."""
    found: dict[str, str] = {}
    for page in sorted(PAGES.glob("*.md"), key=lambda page: (page.stem != "scores", page.stem)):
        for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE):
            found[name] = name
            found.setdefault(name.rpartition(".")[2], name)
    return found


def role(match: re.Match[str], module: str) -> str:
    target = match[1]
    name = documented().get(f"{module}.{target}") or documented().get(target)
    name = name or documented().get(f"late_interaction.{target.rpartition('.')[2]}")
    return f"[`{target}`][{name}]" if name else f"`{target}`"


def entries(lines: list[str]) -> list[str]:
    """A section's lines with each entry's names on one line, as griffe's parser wants them."""
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    found: list[str] = []
    for line in lines:
        if found and found[-1].endswith(",") and not ENTRY.match(found[-1]):
            found[-1] = f"{found[-1]} {line.strip()}"
        elif found and line[indent : indent + 1].strip() and not ENTRY.match(line) and not line.endswith(","):
            found.append(f"    {line}")
        else:
            found.append(line)
    return [] if [line.strip() for line in found if line.strip()] == ["None."] else found


def sections(text: str) -> str:
    """A docstring of a function or class with its sections as griffe's parser wants them."""
    parts = re.split(
        r"^(Args|Returns|Raises|Attributes|Example):\n((?:(?: {4,}.*)?\n)*)", text + "\n", flags=re.MULTILINE
    )
    found = parts[0]
    for heading, body, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        lines = body.rstrip().splitlines()
        if heading in ("Args", "Raises", "Attributes"):
            lines = entries(lines)
        if "".join(lines).strip() not in ("", "None."):
            name = "Examples" if heading == "Example" else heading
            found += "\n".join([f"{name}:", *lines, "", ""])
        found += rest
    return found.rstrip()


def markdown(text: str, module: str) -> str:
    """A docstring as Markdown: roles as links, definitions and literal blocks as Markdown has them."""
    text = ROLE.sub(lambda match: role(match, module), text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    text = re.sub(r"^(>>> .*(?:\n.+)*)", r"```pycon\n\1\n```", text, flags=re.MULTILINE)
    # A term in double backticks, on one or more lines, and its definition indented below it.
    return re.sub(
        r"^(``[^`]+``)\n((?: {4}.*\n?)+)",
        lambda match: f"{' '.join(match[1].split())}\n\n:{match[2][1:]}\n",
        text,
        flags=re.MULTILINE,
    )


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = sections(obj.docstring.value) if not obj.is_module else obj.docstring.value
            obj.docstring.value = markdown(text, obj.module.path)
