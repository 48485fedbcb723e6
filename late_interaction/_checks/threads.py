"""Objects that one thread may use at a time."""

import threading
from typing import Any


class OneThread:
    """Refuse a second thread while a first one is in this context, which may enter it again.

    Args:
        name: what messages call the object.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"this {self._name} is in use by another thread: it serves one at a time, as the order of"
                f" calls matters to it. Give each thread a {self._name} of its own"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return OneThread, (self._name,)  # a copy is another object, which nobody uses yet
