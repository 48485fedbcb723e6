"""What a run does about a measurement that fails: the row says why, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bench.harness.library import UnsupportedError
from bench.harness.results import Row
from bench.harness.settings import Settings
from bench.harness.text import error_text

Result = TypeVar("Result")


def attempt(
    settings: Settings, row: Row, key: tuple[object, ...], work: Callable[[], Result]
) -> Result | None:
    """What work() returns, or None if it fails; then the row has the reason. key: what a TimeoutError stands
    for, which is not tried again in this run."""
    try:
        if key in settings.gave_up:
            raise UnsupportedError("took too long to compile or tune before")
        return work()
    except UnsupportedError as reason:
        row["skipped"] = str(reason)
    except TimeoutError as reason:
        row["error"] = error_text(reason)
        settings.gave_up.add(key)
    except Exception as error:  # one failure must not end the run
        row["error"] = error_text(error)
    if key in settings.gave_up:
        row["over_limit_s"] = settings.limit_s
    return None
