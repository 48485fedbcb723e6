"""nvcc_report.py NVCC ARGS... -o OBJECT: runs nvcc, and keeps what `ptxas -v` says beside the object file.

Of the architectures a source is compiled for those that it has kernels for (code_for.py).

The report (registers, spills, shared memory of every kernel) goes to OBJECT.ptxas; anything else that nvcc
prints is passed on, so that a quiet build stays quiet and a warning stays visible. nvcc's temporary files lie
beside the object too, and go with this process, also when it is interrupted.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from code_for import without_unneeded

# What `ptxas -v` prints for every function, warned about or not.
REPORT = re.compile(
    r"ptxas info\s+: |Function properties for |\s+\d+ bytes stack frame|"
    r"ptxas \d+ bytes|Compile time = |\s*\d+ bytes (gmem|cmem)"
)


def main():
    command = without_unneeded(sys.argv[1:])
    target = Path(command[command.index("-o") + 1])
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as folder:
        environment = os.environ | {"TMPDIR": folder}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    report, other = [], []
    for line in done.stdout.splitlines(keepends=True):
        (report if REPORT.match(line) else other).append(line)
    Path(f"{target}.ptxas").write_text("".join(report))
    sys.stdout.write("".join(other))
    return done.returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
