"""Scorers of tests/search/test_ray.py whose processes are killed while they search, and a slow reader."""

import os
import signal
import time
from pathlib import Path

from late_interaction._ray.search import Scorer


def first_block_last(table):
    """The table, of a first block only once the others have been read."""
    if table.num_rows == 9:
        time.sleep(1)
    return table


class Recording(Scorer):
    """Writes which process searched which block, and when it was killed, into a folder."""

    folder = Path(os.environ.get("LATE_INTERACTION_RAY_TEST", "."))

    def search(self, block, first, stop):
        name = f"{block.num_rows}.{os.getpid()}"
        (self.folder / f"begun.{name}").touch()
        found = super().search(block, first, stop)
        (self.folder / f"done.{name}").touch()
        return found


class KilledOnce(Recording):
    """Its process is killed the first time that it has scored a block of 7 rows, before it tells."""

    def search(self, block, first, stop):
        found = super().search(block, first, stop)
        if block.num_rows == 7 and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


class KilledAlways(Recording):
    """A block of 7 rows kills every process that scores it."""

    def search(self, block, first, stop):
        if block.num_rows == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().search(block, first, stop)
