"""`python -m bench`: see bench/command_line.py."""

import sys

from bench.command_line import main

if __name__ == "__main__":
    sys.exit(main())
