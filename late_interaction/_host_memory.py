"""How much memory a process on Linux can still take."""

from collections.abc import Iterator
from pathlib import Path

# The files of a control group, in version 2 and 1: its limit, what it uses, and the field of memory.stat that
# says how much of that are cached files, which make room for other pages.
_Names = tuple[str, str, str]
_V2: _Names = ("memory.max", "memory.current", "inactive_file")
_V1: _Names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that Linux says are available, within the limits of the process's control groups.

    0 where neither is known. ``root``: where /proc and /sys are.
    """
    available = _field(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        return 0
    left = available * 1024
    for group, (limit_name, used_name, cached_name) in _groups(root):
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is not None and used is not None:
            cached = _field(group / "memory.stat", cached_name) or 0
            left = min(left, limit - used + cached)
    return max(left, 0)


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the control groups that the process is in, and those around them."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        group = top / path.strip("/")
        yield group, names
        for outer in group.parents if group != top else ():
            yield outer, names
            if outer == top:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """None: there is no such file, or no limit ("max")."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return None
