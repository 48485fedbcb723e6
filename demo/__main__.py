"""Entry point of `python -m demo`: turns Ctrl-C into one line and exit status 130."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from demo.steps import run  # here, so that Ctrl-C during the slow imports is caught too

        return run()
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
