"""progress= of the functions that take a while: False, True (a tqdm bar) or a function of (done, total)."""

import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Progress = bool | Callable[[int, int], None]


@contextmanager
def bar(total: int, **options: Any) -> "Iterator[Any]":
    """Show a tqdm bar on a terminal or in a notebook.

    Where stderr is a file or a pipe, one line when the work ends: the bar as it was last.
    """
    from tqdm.asyncio import tqdm_asyncio
    from tqdm.auto import tqdm

    # tqdm.auto is a widget in a notebook, and tqdm_asyncio everywhere else.
    if tqdm is not tqdm_asyncio or sys.stderr.isatty():
        with tqdm(total=total, **options) as shown:
            yield shown
        return
    with open(os.devnull, "w") as nowhere, tqdm(total=total, file=nowhere, **options) as hidden:
        try:
            yield hidden
        finally:
            print(hidden, file=sys.stderr)


@contextmanager
def reporter(progress: Progress, total: int) -> "Iterator[Callable[[int], None]]":
    """Yield a function to be told how many documents are done."""
    if progress is True:
        try:
            import tqdm.auto  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "progress=True needs tqdm (pip install tqdm); a function(done, total) does not"
            ) from error
        with bar(total, unit=" documents", unit_scale=True) as shown:
            yield lambda done: shown.update(done - shown.n)
    elif progress is False:
        yield lambda done: None
    elif callable(progress):
        yield lambda done: progress(done, total)
    else:
        raise TypeError(
            f"progress must be True, False or a function(done, total), got {type(progress).__name__}"
        )
