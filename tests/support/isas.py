"""The instruction sets that the CPU kernels are written for, on machines like this one."""

import platform

ISAS = ["portable"]
if platform.machine() in ("x86_64", "AMD64"):
    ISAS += ["avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
else:
    ISAS += ["neon", "neon_dotprod", "neon_bf16"]
