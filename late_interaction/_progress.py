"""progress= of the functions that take a while: False, True (a tqdm bar) or a function of (done, total)."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Progress = bool | Callable[[int, int], None]


@contextmanager
def reporter(progress: Progress, total: int) -> "Iterator[Callable[[int], None]]":
    """Yields a function to be told how many documents are done."""
    if progress is True:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError(
                "progress=True needs tqdm (pip install tqdm); a function(done, total) does not"
            ) from error
        with tqdm(total=total, unit=" documents", unit_scale=True) as bar:

            def advance(done: int) -> None:
                bar.update(done - bar.n)

            yield advance
    elif progress is False:
        yield lambda done: None
    elif callable(progress):
        yield lambda done: progress(done, total)
    else:
        raise TypeError(
            f"progress must be True, False or a function(done, total), got {type(progress).__name__}"
        )
