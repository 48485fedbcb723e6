"""tools/pending_loads.py: no kernel gives TMA a stage of shared memory while it still loads from it."""

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.programs import ROOT, printed, python
from tools.pending_loads import instructions, kernels, pending_loads

TOOL = ROOT / "tools" / "pending_loads.py"
OBJECTS = Path(sys.prefix) / "build" / "objects" / "late_interaction._cuda" / "csrc" / "cuda"
PACKAGED = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
# Three kernels that give a stage back too early, to another warp and to TMA itself, and two that wait.
EARLY = r"""
#include <cstdint>
__device__ uint32_t load(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at));
  return x;
}
__device__ void arrive(uint32_t at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ void copy(uint32_t to, const void* from, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];"
               ::"r"(to), "l"(from), "r"(barrier)
               : "memory");
}
extern "C" __global__ void arrives_too_early(uint32_t* out, uint32_t at) {
  const uint32_t x = load(at);
  arrive(at + 64);
  out[threadIdx.x] = x;
}
extern "C" __global__ void arrives_in_time(uint32_t* out, uint32_t at) {
  const uint32_t x = load(at);
  arrive(at + 64 + (x & 8));
  out[threadIdx.x] = x;
}
extern "C" __global__ void copies_too_early(uint32_t* out, uint32_t at) {
  const uint32_t x = load(at);
  copy(at, out, at + 64);
  out[threadIdx.x] = x;
}
extern "C" __global__ void copies_a_box_too_early(uint32_t* out, uint32_t at, const void* map) {
  uint32_t x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x) : "r"(at));
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %2}], [%3];"
               ::"r"(at), "l"(map), "r"(0), "r"(at + 64)
               : "memory");
  out[threadIdx.x] = x;
}
extern "C" __global__ void copies_in_time(uint32_t* out, uint32_t at) {
  const uint32_t x = load(at);
  copy(at, out, at + 64 + (x & 8));
  out[threadIdx.x] = x;
}
"""
LOAD, ARRIVE = "LDS R4, [R2]", "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R8+0x8], RZ"


def instruction(address, text, sets=7, waits=0):
    upper = f"/* 0x{sets << 46 | waits << 52:016x} */"
    return f"\t/*{address:04x}*/  {text} ;  /* 0x0000000402047984 */\n\t\t  {upper}\n"


def listing(*instructions):
    lines = [instruction(16 * i, *each) for i, each in enumerate(instructions)]
    return "\t\tFunction : _Z6kernelv\n" + "".join(lines)


LOADS, ARRIVES, USES, END = (LOAD, 2), (ARRIVE,), ("FADD R1, R4, R4", 7, 1 << 2), ("EXIT",)
AGAIN = ("@P1 BRA 0x0",)
# Instructions, and the loads that are under way at each arrival.
LISTINGS = {
    "nothing waits for the load": ([LOADS, ARRIVES, USES, END], {16: {0}}),
    "its use waits": ([LOADS, USES, ARRIVES, END], {}),
    "any instruction waits": ([LOADS, ("IADD3 R8, R8, R9, RZ", 7, 0b111111), ARRIVES, END], {}),
    "the arrival waits": ([LOADS, (ARRIVE, 7, 1 << 2), END], {}),
    "another scoreboard": ([LOADS, ("FADD R1, R5, R5", 7, 1 << 3), ARRIVES, END], {32: {0}}),
    "one of two ways waits": ([LOADS, ("@P1 BRA 0x30",), USES, ARRIVES, END], {48: {0}}),
    "the way that is taken waits": ([LOADS, ("BRA 0x30",), ARRIVES, USES, ARRIVES, END], {}),
    "a load of the round before": ([ARRIVES, (LOAD, 1), AGAIN, END], {0: {16}}),
    "each round waits first": ([("NOP", 7, 1 << 1), ARRIVES, (LOAD, 1), AGAIN, END], {}),
    "producers' arrivals, which expect bytes": ([LOADS, ("SYNCS.ARRIVE.TRANS64 RZ, [R8], R9",), END], {}),
}


@pytest.mark.parametrize("case", LISTINGS)
def test_loads_under_way(case):
    written, pending = LISTINGS[case]
    ((name, part),) = kernels(listing(*written))
    body = instructions(part)
    assert name == "_Z6kernelv" and len(body) == len(written)
    assert pending_loads(body) == pending


def test_the_command(tmp_path):
    path = tmp_path / "kernel.sass"
    path.write_text(listing((LOAD, 2), (ARRIVE,), ("EXIT",)))
    run = python(TOOL, path)
    assert run.returncode == 1 and "under way: 0x0 LDS R4, [R2]" in run.stdout
    run = python(TOOL, path, "--kernel", "other")
    assert run.returncode == 1 and "0 kernels" in run.stdout


def has_kernels(path):
    return (ROOT / "csrc" / "cuda" / path.relative_to(OBJECTS)).with_suffix(".cu").exists()


def run_tool(*words):
    tools = PACKAGED if (PACKAGED / "cuobjdump").exists() else None
    if tools is None and shutil.which("cuobjdump") is None:
        pytest.skip("no cuobjdump is here: it comes with requirements/dev.txt, or the CUDA toolkit")
    where = ["--tools", str(tools)] if tools else []
    return python(TOOL, *where, *words)


def test_no_kernel_gives_tma_a_stage_that_it_still_loads_from():
    """Else a few of 2,300 documents of int8 or fp8 tokens had scores that were some percent off.

    wgmma alone reads the stages of sm90_q. Ordinary stores wrote what its warps load: masks, scales, maxima.
    ldmatrix alone reads those of sm80_q: its threads load by LDS what each of them keeps for itself.
    """
    objects = [path for path in OBJECTS.rglob("*.o") if has_kernels(path)]
    if not objects:
        pytest.skip("no CUDA library was built here (no nvcc)")
    # No older machine code has TMA, or these arrivals.
    sm80_q = "maxsim_forward_sm80_qI"
    run = run_tool(*objects, "--arch", "sm_90a", "--ordinary", "maxsim_forward_sm90_qI", sm80_q)
    assert run.returncode == 0, run.stdout + run.stderr
    compiled = [path for path in objects if "sm80_q" in path.parts]
    run = run_tool(*compiled, "--arch", "sm_90a", "--kernel", sm80_q)
    assert len(compiled) == 10 and "40 kernels" in run.stdout, run.stdout[-200:]
    assert "LDSM" not in run.stdout, run.stdout


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc is here")
def test_a_kernel_that_gives_its_stage_back_too_early_is_found(tmp_path):
    """A loaded word that is used only behind the arrival, as the compiler may order it."""
    source = tmp_path / "early.cu"
    source.write_text(EARLY)
    printed("nvcc", "-cubin", "-arch=sm_90a", "-o", tmp_path / "early.cubin", source)
    run = run_tool(tmp_path / "early.cubin")
    lines = [line for line in run.stdout.splitlines() if "0x" in line and "under" not in line]
    found = sorted(line.split()[0] for line in lines)
    early = ["arrives_too_early:", "copies_a_box_too_early:", "copies_too_early:"]
    assert run.returncode == 1 and found == early, run.stdout
