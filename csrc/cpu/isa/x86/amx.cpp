// AVX-512 with AMX: as AVX-512 with BF16, and products of bf16 and of int8 codes in the tile unit (16 x 16
// sums of 16 steps in one instruction; bf16 subnormals are flushed to zero).
#if defined(__x86_64__)
#include <immintrin.h>

#include "../../kernels.h"
#include "../target.h"
#ifndef LATE_INTERACTION_TILES
#define LATE_INTERACTION_TILES "tiles_amx.h"
#endif

LI_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include LATE_INTERACTION_TILES

#include "avx512.inc.h"

#include "../codes.inc.h"

#include "amx.inc.h"

namespace late_interaction::cpu {

bool has_amx() { return Tiles::available(); }

bool permit_amx() { return Tiles::permitted(); }

bool prefers_amx() { return !Tiles::kEmulated; }

void fill_amx(Kernels& k) {
  fill_avx512_bf16(k);  // every CPU with AMX has it
  use_tiles<TileBf16>(k.bf16);
  use_tiles<TileInt8>(k.int8);
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
