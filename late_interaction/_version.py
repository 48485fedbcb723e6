"""The version of the installed distribution, or of the VERSION file of a source tree."""

from importlib import metadata
from pathlib import Path


def _read() -> str:
    try:
        return metadata.version("late-interaction")
    except metadata.PackageNotFoundError:
        file = Path(__file__).resolve().parent.parent / "VERSION"
        return file.read_text().strip() if file.exists() else "0+unknown"


__version__ = _read()
