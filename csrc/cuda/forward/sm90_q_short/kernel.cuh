// MaxSim forward on Hopper for many query rows against short documents: query rows on the M side of wgmma,
// several documents in a tile of tokens.
//
//                       a stage of the ring: kDocs slots of kSlotTokens columns
//                     +--------+--------+--------+--------+--------+--------+
//   256 query rows,   | doc j  | j + 1  | j + 2  | j + 3  | j + 4  | j + 5  |  warpgroup 0: rows   0..127
//   resident in       |        |        |        |        |        |        |  warpgroup 1: rows 128..255
//   shared memory     +--------+--------+--------+--------+--------+--------+  each as two blocks of 64
//
// A slot has 8, 16, 24, 32, 48 or 64 columns, as few as hold every document. One TMA box brings all documents
// of a stage, with zeros behind each document's end; those columns are left out. Packed documents come one
// box each, and a longer one takes several slots (slots.cu). Slots begin at multiples of 8 columns, of which
// each lane of a quad sees two, so all lanes have a document in the same registers, which a fold names.
//
// Who owns what
//   block      one a multiprocessor, persistent: a contiguous range of (row tile, document group).
//   consumer   each of warpgroups 0 and 1: multiplies both its blocks of 64 rows with every stage, finds the
//              maximum of each (row, document), and leaves them in its ShortEpilogueBuffer.
//   producer   one thread of warpgroup 2: TMA loads of Q tiles and of the ring's stages.
//   mask producer
//              the next warp of warpgroup 2, where documents have masks (kMasked): it writes for each
//              column of a stage the largest similarity that counts: infinity, or minus infinity.
//   epilogue   the other two warps of warpgroup 2, one for each consumer (epilogue_warp.cuh).
#pragma once

#include "../../primitives/fold.cuh"
#include "../sm90_pipeline.cuh"
#include "epilogue_warp.cuh"

namespace late_interaction {

// whole: all documents have Ld tokens. masked: the same, and some tokens may not count. packed: documents
// differ in length, and take as many slots as they need.
enum class ShortDocs { whole, masked, packed };

// kSteps: wgmma of 16 elements that an embedding takes.
template <class Type_, class Element_, int kSlotTokens_, int kDocs_, int kSteps_, bool kWinners_,
          ShortDocs kKind_>
struct Sm90QShortTile {
  using Type = Type_;
  using Element = Element_;
  static constexpr int kSlotTokens = kSlotTokens_, kDocs = kDocs_, kColumns = kSlotTokens * kDocs;
  static constexpr int kSteps = kSteps_, kKChunks = (kSteps + 3) / 4;
  static constexpr bool kWinners = kWinners_, kMasked = kKind_ != ShortDocs::whole;
  static constexpr bool kPacked = kKind_ == ShortDocs::packed;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kFirstEpilogueWarp = kThreads / 32 - kConsumers;
  static constexpr int kRows = 128 * kConsumers, kWarpRows = 128;
  static constexpr int kLaneRows = 4;  // of an epilogue warp's lane
  static constexpr int kConsumerRegisters = 192, kHelperRegisters = 112;
  // The even lanes of a quad store the maxima of documents [0, kHalf), the odd lanes those of the others.
  static constexpr int kHalf = (kDocs + 1) / 2, kSlots = 2 * kHalf;
  // Groups of 8 columns that may lie behind the end of documents which no narrower tile takes.
  static constexpr int kTailGroups = kSlotTokens > 32 ? 2 : 1;
  static constexpr uint32_t kQKChunkBytes = kRows * kKChunkBytes;
  static constexpr uint32_t kStageKChunkBytes = kColumns * kKChunkBytes;
  static constexpr uint32_t kStageBytes = kKChunks * kStageKChunkBytes;
  static constexpr uint32_t kLimitBytes = kMasked ? 4 * kColumns : 0;  // of a stage

  static __device__ __forceinline__ int slot(int warp, int lane, int o) {
    return kWarpRows * warp + 4 * lane + o;
  }
};

// Shared memory of a block, in this order: the Q tile, the ring, limits, epilogue buffers, mbarriers.
template <class Tile>
struct Sm90QShortShared {
  // Bytes beside the Q tile, the ring and its limits.
  static constexpr int kBeside = Tile::kConsumers * ShortEpilogueBuffer<Tile>::kBytes + 256;
  uint32_t q, first_stage, limits, buffers, barriers;

  __device__ __forceinline__ Sm90QShortShared(const uint8_t* base, int stages)
      : q(ptx::smem_address(base)),
        first_stage(q + Tile::kKChunks * Tile::kQKChunkBytes),
        limits(first_stage + stages * Tile::kStageBytes),
        buffers(limits + stages * Tile::kLimitBytes),
        barriers(buffers + Tile::kConsumers * ShortEpilogueBuffer<Tile>::kBytes) {}

  __device__ __forceinline__ uint32_t stage(int i) const { return first_stage + i * Tile::kStageBytes; }
  __device__ __forceinline__ uint32_t limits_of(int i) const { return limits + i * Tile::kLimitBytes; }
  __device__ __forceinline__ Ring q_ring() const { return {barriers}; }
  __device__ __forceinline__ ShortEpilogueBuffer<Tile> epilogue_buffer(int consumer) const {
    return {buffers + consumer * ShortEpilogueBuffer<Tile>::kBytes, {barriers + 16 + 32 * consumer}};
  }
  __device__ __forceinline__ Ring ring() const { return {barriers + 80}; }
};

// The producer, one thread: loads Q tiles and document groups.
template <class Tile>
__device__ __forceinline__ void load_short_docs(const ForwardArgs& p, const TensorMaps& maps,
                                                const Sm90QShortShared<Tile>& smem) {
  PipelineState state, q_state;
  for (auto range = DocGroupRange<Tile>::of_block(p); range.next < range.end; q_state.advance(1)) {
    const auto items = DocGroupWork<Tile>::take(p, range);
    load_q_tile<Tile>(
        maps.Q, smem.q, smem.q_ring(), q_state, [&] { return first_query_token(p, items.tile); },
        items.tile.query);
    for (int32_t group = items.first; group < items.end; ++group) {
      int32_t first[Tile::kDocs];
      if constexpr (Tile::kPacked) {
#pragma unroll
        for (int g = 0; g < Tile::kDocs; ++g) first[g] = p.doc_ranges[group * Tile::kDocs + g].first;
      }
      smem.ring().producer_acquire(state);
      smem.ring().producer_expect(state.stage, Tile::kStageBytes);
      for (int k_chunk = 0; k_chunk < Tile::kKChunks; ++k_chunk) {
        const uint32_t to = smem.stage(state.stage) + k_chunk * Tile::kStageKChunkBytes;
        const int dim = k_chunk * (kKChunkBytes / 2);
        if constexpr (Tile::kPacked) {
#pragma unroll
          for (int g = 0; g < Tile::kDocs; ++g) {
            ptx::tma_load_4d(to + g * Tile::kSlotTokens * kKChunkBytes, &maps.D,
                             smem.ring().full(state.stage), dim, first[g], 0, 0);
          }
        } else {
          ptx::tma_load_4d(to, &maps.D, smem.ring().full(state.stage), dim, 0, group * Tile::kDocs,
                           items.tile.query);
        }
      }
      state.advance(p.stages);
    }
  }
}

// True if a token of document (packed: slot) j counts.
template <class Tile>
__device__ __forceinline__ bool short_column_counts(const ForwardArgs& p, int32_t query, int32_t j,
                                                    int token) {
  if constexpr (Tile::kPacked) return token < p.doc_ranges[j].length;
  if (j >= p.N || token >= p.Ld) return false;
  const uint8_t* mask = document_mask(p, query, j);
  return mask == nullptr || mask[token * p.d_mask.token_stride] != 0;
}

// One warp: lane l writes the limits of columns l, l + 32, ... of each stage, whose mask it loads before.
template <class Tile>
__device__ __forceinline__ void write_short_limits(const ForwardArgs& p, const Sm90QShortShared<Tile>& smem) {
  constexpr int kRounds = (Tile::kColumns + 31) / 32;
  const int lane = ptx::tid_x() % 32;
  PipelineState state;
  for (auto range = DocGroupRange<Tile>::of_block(p); range.next < range.end;) {
    const auto items = DocGroupWork<Tile>::take(p, range);
    for (int32_t group = items.first; group < items.end; ++group) {
      float limit[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int column = 32 * i + lane, token = column % Tile::kSlotTokens;
        const int32_t j = group * Tile::kDocs + column / Tile::kSlotTokens;
        limit[i] = column < Tile::kColumns && short_column_counts<Tile>(p, items.tile.query, j, token)
                       ? INFINITY
                       : -INFINITY;
      }
      smem.ring().producer_acquire(state);
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int column = 32 * i + lane;
        if (column < Tile::kColumns)
          ptx::st_shared(smem.limits_of(state.stage) + 4 * column, __float_as_uint(limit[i]));
      }
      smem.ring().producer_commit(state.stage);
      state.advance(p.stages);
    }
  }
}

// A token is the float 2^23 + token: MaximumFold computes with floats, and the low bits are the token.
inline constexpr float kTokenZero = 8388608.0f;

// As exchange_halves (../epilogue.cuh), without the branch that the compiler makes of its rule for ties:
// lanes of a warp would wait for each other eighteen times a tile.
template <bool kWinners>
__device__ __forceinline__ void exchange_rows(float& low, int32_t& low_token, float high, int32_t high_token,
                                              bool upper, int partner) {
  const float got = __shfl_xor_sync(kFullWarp, upper ? low : high, partner);
  low = upper ? high : low;
  if constexpr (kWinners) {
    const int32_t got_token = __shfl_xor_sync(kFullWarp, upper ? low_token : high_token, partner);
    low_token = upper ? high_token : low_token;
    asm("{\n.reg .pred above, lower, tie;\n"
        "setp.gt.f32 above, %2, %1;\n"
        "setp.lt.u32 lower, %3, %0;\n"
        "setp.eq.and.f32 tie, %2, %1, lower;\n"
        "or.pred above, above, tie;\n"
        "selp.b32 %0, %3, %0, above;\n}\n"
        : "+r"(low_token)
        : "f"(low), "f"(got), "r"(got_token));
  }
  low = max_keeping_nan(low, got);
}

template <class Tile>
struct Sm90QShortConsumer {
  const ForwardArgs& p;
  const Sm90QShortShared<Tile>& smem;
  const ShortEpilogueBuffer<Tile> epilogue_buffer;
  uint32_t q_blocks;  // this warpgroup's rows of the Q tile
  PipelineState state;
  uint32_t handed;    // document groups left to the epilogue warp so far
  float first_token;  // kTokenZero + the first column of a group of 8 that this lane sees
  // Added to the lane's columns of a document's last groups of 8: 0, or minus infinity behind the end.
  float tail_bias[Tile::kTailGroups][2];

  __device__ __forceinline__ void multiply(float (&c)[Tile::kColumns / 2], int block) const {
    multiply_rows<typename Tile::Type, Tile::kColumns, Tile::kSteps, Tile::kQKChunkBytes,
                  Tile::kStageKChunkBytes>(c, q_blocks + block * 64 * kKChunkBytes, smem.stage(state.stage));
  }

  // Folds a row half's columns of document `doc`. limits: of the lane's columns of the stage.
  __device__ __forceinline__ void fold_doc(const float (&c)[Tile::kColumns / 2], int doc, int half,
                                           uint32_t limits, float& value, int32_t& token) const {
    constexpr int kGroups = Tile::kSlotTokens / 8;
    MaximumFold<Tile::kWinners> best;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const int group = doc * kGroups + n;
      float a = c[4 * group + 2 * half], b = c[4 * group + 2 * half + 1];
      if constexpr (Tile::kMasked) {
        // fminf of NaN and a number is the number: a NaN that counts becomes infinite, so the row is rare.
        const float2 limit = ptx::ld_shared_v2_f32(limits + 32 * group);
        a = fminf(a, limit.x);
        b = fminf(b, limit.y);
      } else if (n >= kGroups - Tile::kTailGroups) {
        a += tail_bias[n - (kGroups - Tile::kTailGroups)][0];
        b += tail_bias[n - (kGroups - Tile::kTailGroups)][1];
      }
      if (n == 0) {
        best.value = max_keeping_nan(a, b);
        best.pair = first_token;
        best.first = a;
      } else {
        best.fold(a, b, first_token, 8.0f * n, p.zeros[0]);
      }
    }
    value = best.value;
    if constexpr (Tile::kWinners) {
      token = __float_as_int(best.first == best.value ? best.pair : best.pair + 1.0f);
    }
  }

  // Stores the maxima of a block of 64 rows. Of a quad's lanes, 0 and 1 end with the rows lane / 4, and 2 and
  // 3 with the rows 8 below; even lanes with the first half of the documents.
  __device__ __forceinline__ void fold_block(const float (&c)[Tile::kColumns / 2], int block) const {
    const int lane = ptx::tid_x() % 32, warp = ptx::tid_x() / 32 % 4;
    const uint32_t limits = smem.limits_of(state.stage) + 8 * (lane % 4);
    const uint32_t buffer = epilogue_buffer.of(handed);
    const int row = 64 * block + 16 * warp + lane / 4 + (lane & 2) * 4;
    const uint32_t first_doc = (lane & 1) * Tile::kHalf;
    const uint32_t value_to = buffer + first_doc * ShortEpilogueBuffer<Tile>::kDocBytes + 4 * row;
    const uint32_t token_to = buffer + ShortEpilogueBuffer<Tile>::kValueBytes + 128 * first_doc + row;
    const auto half_rows = [&](int doc, float& value, int32_t& token) {
      float other;
      int32_t other_token = 0;
      token = 0;
      fold_doc(c, doc, 0, limits, value, token);
      fold_doc(c, doc, 1, limits, other, other_token);
      exchange_rows<Tile::kWinners>(value, token, other, other_token, lane & 2, 2);
    };
#pragma unroll
    for (int k = 0; k < Tile::kHalf; ++k) {
      float value, other;
      int32_t token, other_token;
      half_rows(k, value, token);
      if (k + Tile::kHalf < Tile::kDocs) {
        half_rows(k + Tile::kHalf, other, other_token);
      } else {  // no document: nobody reads what the odd lanes store
        other = value;
        other_token = token;
      }
      exchange_rows<Tile::kWinners>(value, token, other, other_token, lane & 1, 1);
      ptx::st_shared(value_to + k * ShortEpilogueBuffer<Tile>::kDocBytes, __float_as_uint(value));
      if constexpr (Tile::kWinners) ptx::st_shared_b8(token_to + 128 * k, token);
    }
  }

  // If columns have limits, each lane arrives, since each reads different ones.
  __device__ __forceinline__ void release() const {
    if (Tile::kMasked || ptx::tid_x() % 32 == 0) smem.ring().consumer_release(state.stage);
  }

  // The other consumer's wgmma run while this one folds its second block.
  __device__ __forceinline__ void take_tile() {
    float c[2][Tile::kColumns / 2];
    smem.ring().consumer_wait(state);
    multiply(c[0], 0);
    multiply(c[1], 1);
    epilogue_buffer.ring.producer_acquire(epilogue_buffer.state(handed));
    ptx::wgmma_wait<1>();
    fold_block(c[0], 0);
    ptx::wgmma_wait<0>();
    if constexpr (!Tile::kMasked) release();
    fold_block(c[1], 1);
    if constexpr (Tile::kMasked) release();
    state.advance(p.stages);
    epilogue_buffer.ring.producer_commit(handed++ % 2);
  }

  __device__ __forceinline__ void run() {
    const int quad = ptx::tid_x() % 4;
    first_token = kTokenZero + 2 * quad + p.zeros[0];
#pragma unroll
    for (int i = 0; i < 2 * Tile::kTailGroups; ++i) {
      const int column = Tile::kSlotTokens - 8 * Tile::kTailGroups + i / 2 * 8 + 2 * quad + i % 2;
      tail_bias[i / 2][i % 2] = column < p.Ld ? 0.0f : -INFINITY;
    }
    handed = 0;
    PipelineState q_state;
    for (auto range = DocGroupRange<Tile>::of_block(p); range.next < range.end; q_state.advance(1)) {
      const auto items = DocGroupWork<Tile>::take(p, range);
      smem.q_ring().consumer_wait(q_state);
      // From lane 0, so that the compiler knows that all lanes take as many.
      int32_t left = __shfl_sync(kFullWarp, items.end - items.first, 0);
      for (; left > 0; --left) take_tile();
      if (threadIdx.x % 32 == 0) smem.q_ring().consumer_release(0);
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_sm90_q_short(const __grid_constant__ ForwardArgs p,
                                const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const Sm90QShortShared<Tile> smem(shared, p.stages);
  if (threadIdx.x == 0) {
    smem.ring().init(p.stages, Tile::kMasked ? 1 + 32 : 1, (Tile::kMasked ? 128 : 4) * Tile::kConsumers);
    for (int consumer = 0; consumer < Tile::kConsumers; ++consumer)
      smem.epilogue_buffer(consumer).ring.init(2, 128, 32);
    smem.q_ring().init(1, 1, 4 * Tile::kConsumers);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::pdl_wait();

  // From lane 0, so that the compiler knows that a warp takes one branch.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == Tile::kConsumers) {
    ptx::setmaxnreg_dec<Tile::kHelperRegisters>();
    const int helper = threadIdx.x - 128 * Tile::kConsumers;
    if (helper == 0) {
      load_short_docs<Tile>(p, maps, smem);
      ptx::pdl_launch_dependents();
    }
    if constexpr (Tile::kMasked) {
      if (helper / 32 == 1) write_short_limits<Tile>(p, smem);
    }
    const int consumer = threadIdx.x / 32 - Tile::kFirstEpilogueWarp;
    if (consumer >= 0) run_short_epilogue_warp<Tile>(p, smem.epilogue_buffer(consumer), consumer);
  } else {
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    Sm90QShortConsumer<Tile> consumer{p, smem, smem.epilogue_buffer(warpgroup),
                                      smem.q + 2 * warpgroup * 64 * kKChunkBytes};
    consumer.run();
  }
#endif
}

}  // namespace late_interaction
