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
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,6})\*/\s*([^;\n]*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x([0-9a-f]{16}) \*/"
)
# The lowest nine bits of an instruction, on Volta and newer: LDS, LDSM; SYNCS, UTMALDG, UBLKCP.
LOAD_OPCODES = {0x184, 0x03B}
GIVE_BACK_OPCODES = {0x1A7, 0x1B4, 0x1BA}
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
NO_SCOREBOARD = 7


@dataclass
class Instruction:
    """One of Volta or newer: 16 bytes, the scoreboards that it sets and waits for among the upper bits."""

    address: int
    text: str
    second_word: int

    @property
    def conditional(self) -> bool:
        return self.text.startswith("@") or self.name in ("BRA.DIV", "BRA.U.ANY")

    @cached_property
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

    @cached_property
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


def kernels(listing: str) -> Iterator[tuple[str, str]]:
    """(mangled name, its part of the listing) of what `cuobjdump -sass` prints."""
    for part in listing.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        yield name.strip(), body


def instructions(body: str) -> list[Instruction]:
    """What `kernels` gave of a kernel, parsed."""
    return [Instruction(int(at, 16), text, int(second, 16)) for at, text, second in INSTRUCTION.findall(body)]


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


def kernel_codes(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """(mangled name, machine code): the sections of an ELF file that are called .text.NAME."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    count, of_names = struct.unpack_from("<2H", cubin, 60)
    sections = [struct.unpack_from("<2I4Q", cubin, start + 64 * i) for i in range(count)]
    for name, _, _, _, offset, size in sections:
        at = sections[of_names][4] + name
        if cubin.startswith(b".text.", at):
            yield cubin[at + 6 : cubin.index(b"\0", at)].decode(), cubin[offset : offset + size]


def may_have_pending_loads(code: bytes) -> bool:
    """False if a kernel loads nothing from shared memory, or gives none back."""
    opcodes = {word & 0x1FF for word, _ in struct.iter_unpack("<2Q", code)}
    return not (opcodes.isdisjoint(LOAD_OPCODES) or opcodes.isdisjoint(GIVE_BACK_OPCODES))


def listing(path: Path, options: argparse.Namespace) -> tuple[int, set[str], str]:
    """How many kernels the options ask for, the names of those that need a look, and a listing with them."""
    if path.suffix == ".sass":
        text = path.read_text(errors="replace")
        wanted = [name for name, _ in kernels(text) if is_wanted(name, options)]
        return len(wanted), set(wanted), text
    folder = f"{options.tools}{os.pathsep}" if options.tools else ""
    env = {**os.environ, "PATH": folder + os.environ["PATH"]}

    def cuobjdump(*words: str, cwd: str | None = None) -> str:
        arch = ["-arch", options.arch] if options.arch else []
        command = ["cuobjdump", *words, *arch, str(path.resolve())]
        run = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"pending_loads.py: {shlex.join(command)} failed: {run.stderr.strip()[-500:]}")
        return run.stdout

    with tempfile.TemporaryDirectory() as cubins:
        cuobjdump("-xelf", "all", cwd=cubins)
        codes = [code for cubin in Path(cubins).iterdir() for code in kernel_codes(cubin.read_bytes())]
    wanted = [(name, code) for name, code in codes if is_wanted(name, options)]
    names = {name for name, code in wanted if may_have_pending_loads(code)}
    # cuobjdump starts nvdisasm for each kernel that -fun names: about as long as it takes for four of them.
    few = ["-fun", ",".join(sorted(names))] if 4 * len(names) < len(codes) else []
    return len(wanted), names, cuobjdump("-sass", *few) if names else ""


def is_wanted(name: str, options: argparse.Namespace) -> bool:
    return options.kernel in name and not any(part in name for part in options.ordinary)


def report(path: Path, options: argparse.Namespace) -> tuple[int, list[str]]:
    """How many kernels of a file were checked, and what to print of them."""
    checked, names, text = listing(path, options)
    lines = []
    for name, part in kernels(text):
        if name not in names:
            continue
        body = instructions(part)
        texts = {each.address: each.text for each in body}
        for address, loads in sorted(pending_loads(body).items()):
            lines.append(f"{name}: {address:#x} {texts[address]}")
            lines += [f"    under way: {load:#x} {texts[load]}" for load in sorted(loads)]
    return checked, lines


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
    checked = places = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for count, lines in pool.map(partial(report, options=options), options.files):
            checked += count
            places += sum(not line.startswith(" ") for line in lines)
            print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{checked} kernels, {places} places with a load under way")
    return 1 if places or (options.kernel and not checked) else 0


if __name__ == "__main__":
    sys.exit(main())
