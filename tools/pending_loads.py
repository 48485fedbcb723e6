"""pending_loads.py FILE...: where a kernel may give memory back while it still loads from it.

A warp that has read a stage of shared memory arrives on an mbarrier, and TMA then writes the next tile there;
or it starts that copy itself. Neither waits for loads whose results nothing has used yet
(`mbarrier_arrive_after` of csrc/cuda/ptx/mbarrier.cuh makes the arrival wait). A load sets one of a warp's
six scoreboards, and what uses its result waits for that scoreboard. This program follows the scoreboards
along all ways through a kernel, and prints each arrival, and each copy to shared memory, that has a load from
shared memory under way. Exit status 1: there is one.

    python tools/pending_loads.py --kernel sm90_d late_interaction/_cuda.abi3.so

FILE is a CUDA library, an object file, a cubin or a listing that `cuobjdump -sass` wrote (a name that ends in
.sass). cuobjdump and nvdisasm must be on PATH, or in the folder --tools.

Not every line is a fault: what other warps write with ordinary stores is ordered behind the loads before an
arrival; TMA alone is not. `--ordinary NAME` leaves out kernels that load only what ordinary stores wrote.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FUNCTION = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,6})\*/\s*(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
SECOND_WORD = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
NO_SCOREBOARD = 7


@dataclass(frozen=True)
class Instruction:
    """One of Volta or newer: 16 bytes, the scoreboards that it sets and waits for among the upper bits."""

    address: int
    text: str
    second_word: int

    @property
    def conditional(self) -> bool:
        return self.text.startswith("@") or self.name in ("BRA.DIV", "BRA.U.ANY")

    @property
    def name(self) -> str:
        words = self.text.split()
        return words[1 if words[0].startswith("@") else 0] if words else ""

    @property
    def sets(self) -> int | None:
        number = self.second_word >> 46 & 7
        return None if number == NO_SCOREBOARD else number

    @property
    def waits(self) -> int:
        """Bit n: for scoreboard n."""
        return self.second_word >> 52 & 63

    @property
    def target(self) -> int | None:
        found = TARGET.search(self.text) if self.name.startswith("BRA") else None
        return int(found[1], 16) if found else None

    @property
    def loads_shared(self) -> bool:
        return self.name.startswith(("LDS", "LDSM"))

    @property
    def arrives(self) -> bool:
        """On an mbarrier, without bytes for it to expect."""
        return self.name.startswith("SYNCS.ARRIVE") and "A1T0" in self.name

    @property
    def gives_back(self) -> bool:
        """True for an arrival, and for a copy of TMA's to shared memory."""
        return self.arrives or self.name.startswith(("UTMALDG", "UBLKCP.S"))

    @property
    def ends(self) -> bool:
        return self.name.startswith(("EXIT", "RET")) and not self.conditional


def kernels(lines: Iterable[str]) -> Iterator[tuple[str, list[Instruction]]]:
    """(mangled name, instructions) of what `cuobjdump -sass` prints."""
    name, body, first = "", [], None
    for line in lines:
        if match := FUNCTION.match(line):
            if name:
                yield name, body
            name, body = match[1], []
        elif match := INSTRUCTION.match(line):
            first = match
        elif first is not None and (match := SECOND_WORD.match(line)):
            body.append(Instruction(int(first[1], 16), first[2], int(match[1], 16)))
            first = None
    if name:
        yield name, body


def pending_loads(body: list[Instruction]) -> dict[int, set[int]]:
    """Address of what gives memory back -> addresses of the loads that may be under way there."""
    place = {each.address: i for i, each in enumerate(body)}
    # Before an instruction: (scoreboard, address) of each load whose scoreboard nothing has waited for.
    before: dict[int, set[tuple[int, int]]] = {0: set()}
    found: dict[int, set[int]] = {}
    work = [0]
    while work:
        i = work.pop()
        each = body[i]
        pending = {(board, load) for board, load in before[i] if not each.waits >> board & 1}
        if each.gives_back and pending:
            found.setdefault(each.address, set()).update(load for _, load in pending)
        if each.loads_shared and each.sets is not None:
            pending.add((each.sets, each.address))
        following = [] if each.ends or (each.target is not None and not each.conditional) else [i + 1]
        if each.target in place:
            following.append(place[each.target])
        for j in following:
            if j < len(body) and (j not in before or not pending <= before[j]):
                before.setdefault(j, set()).update(pending)
                work.append(j)
    return found


def listing(path: Path, tools: Path | None, arch: str | None) -> list[str]:
    if path.suffix == ".sass":
        return path.read_text(errors="replace").splitlines()
    folder = f"{tools}{os.pathsep}" if tools else ""
    env = {**os.environ, "PATH": folder + os.environ["PATH"]}
    command = ["cuobjdump", "-sass", *(("-arch", arch) if arch else ()), str(path)]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"pending_loads.py: cuobjdump -sass {path} failed: {run.stderr.strip()[-500:]}")
    return run.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--kernel", default="", help="those alone whose mangled name has this in it")
    parser.add_argument(
        "--ordinary", default=[], nargs="*", help="but those whose mangled name has this in it"
    )
    parser.add_argument("--arch", help="the machine code of this architecture alone, sm_90a; default: all")
    parser.add_argument("--tools", type=Path, help="the folder of cuobjdump and nvdisasm")
    options = parser.parse_args()
    checked = lines = 0
    for path in options.files:
        for name, body in kernels(listing(path, options.tools, options.arch)):
            if options.kernel not in name or any(part in name for part in options.ordinary):
                continue
            checked += 1
            texts = {each.address: each.text for each in body}
            for address, loads in sorted(pending_loads(body).items()):
                lines += 1
                print(f"{name}: {address:#x} {texts[address]}")
                for load in sorted(loads):
                    print(f"    under way: {load:#x} {texts[load]}")
    print(f"{checked} kernels, {lines} places with a load under way")
    return 1 if lines or (options.kernel and not checked) else 0


if __name__ == "__main__":
    sys.exit(main())
