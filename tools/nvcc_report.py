"""nvcc_report.py NVCC ARGS...: runs nvcc, and keeps what `ptxas -v` says beside the object file.

The report (registers, spills, shared memory of every kernel) goes to <object>.ptxas; anything else that nvcc
prints is passed on, so that a quiet build stays quiet and a warning stays visible.
"""

import re
import subprocess
import sys
from pathlib import Path

# What `ptxas -v` prints for every function, warned about or not.
REPORT = re.compile(
    r"ptxas info\s+: |Function properties for |\s+\d+ bytes stack frame|"
    r"ptxas \d+ bytes|Compile time = |\s*\d+ bytes (gmem|cmem)"
)


def main():
    command = sys.argv[1:]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    report, other = [], []
    for line in done.stdout.splitlines(keepends=True):
        (report if REPORT.match(line) else other).append(line)
    if "-o" in command:
        Path(command[command.index("-o") + 1] + ".ptxas").write_text("".join(report))
    sys.stdout.write("".join(other))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
