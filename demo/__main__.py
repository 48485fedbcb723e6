"""`python -m demo`: offline, Ctrl-C is one line, and what it writes lies in the virtual environment, or among
temporary files where there is none that can be written to."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

INTERRUPTED = "\nInterrupted."


def main() -> int:
    set_environment()
    # While native code is imported it may swallow a KeyboardInterrupt, so until then Ctrl-C ends the process.
    signal.signal(signal.SIGINT, exit_at_once)
    print("Loading PyTorch and Sentence Transformers ...", flush=True)
    import sentence_transformers  # noqa: F401

    from demo.steps import run

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 130


def set_environment() -> None:
    """What the libraries read when they are imported: no network, no bar for a load of a blink, caches."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    if sys.prefix != sys.base_prefix:
        cache = Path(sys.prefix) / "cache"
        os.environ.setdefault("MPLCONFIGDIR", str(cache / "matplotlib"))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "torchinductor"))


def exit_at_once(*_: object) -> None:
    os.write(sys.stderr.fileno(), f"{INTERRUPTED}\n".encode())
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
