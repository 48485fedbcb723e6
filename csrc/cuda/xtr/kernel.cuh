// XTR's selection: which documents the k largest similarities of a query token lie in. One block a row.
//
//   row         |......|......|......|   one query token's similarities with the tokens of all documents
//   segments    |  max |  max |  max |   up to 4096 of them, in shared memory; the k-th largest is a lower
//                                        bound of the threshold, since at least k cells reach it
//   candidates   . .      .    . . .     the cells that do, little more than k, in shared memory
//   threshold                            their k-th largest, exactly
//   documents   |max, token|  ...        of those with a selected cell
//
// So almost every cell is read once, at one instruction for its maximum; only segments whose maximum reaches
// the bound are read again. Where k is more than the segments, or the candidates do not fit (many equal
// cells), the threshold is found in the row itself, which then is read once for each digit.
#pragma once

#include <climits>
#include <cstdint>

#include "kth_largest.cuh"
#include "ordered_key.cuh"

namespace late_interaction {

inline constexpr int kSelectThreads = 512;

// Of fewer than 48 KiB of shared memory, which a kernel has without asking.
template <class Key>
inline constexpr uint32_t kMostSegments = 16384 / sizeof(Key);
template <class Key>
inline constexpr uint32_t kMostCandidates = 24576 / (sizeof(Key) + sizeof(uint32_t));

template <class Real>
struct SelectArgs {
  const Real* similarities;
  int64_t row_stride;
  const uint8_t* d_mask;  // with kMasked
  uint32_t documents, Ld, tokens, k;
  uint32_t lane_cells;  // of a segment: a lane's share of a chunk of 32 * lane_cells consecutive cells
  uint32_t chunks;
  bool zero_unless_all;
  void* maxima;  // [rows, documents] of Real; of keys until all candidates have been seen
  int32_t* winners;
};

// A row's cells, as items of a search: item i is cell i.
template <class Real, bool kMasked>
struct RowCells {
  using Key = typename OrderedKey<Real>::Key;
  const Real* row;
  const uint8_t* mask;
  uint32_t count;

  __device__ __forceinline__ bool kept(uint32_t cell) const { return !kMasked || mask[cell] != 0; }
  __device__ __forceinline__ Real number(uint32_t cell) const {
    const Real x = row[cell];
    return kept(cell) ? x : OrderedKey<Real>::kLowest;
  }
  __device__ __forceinline__ Key key(uint32_t cell) const { return OrderedKey<Real>::of(number(cell)); }
  __device__ __forceinline__ uint32_t cell(uint32_t item) const { return item; }
};

template <class Key>
struct Candidates {
  const Key* keys;
  const uint32_t* cells;
  uint32_t count;

  __device__ __forceinline__ Key key(uint32_t item) const { return keys[item]; }
  __device__ __forceinline__ uint32_t cell(uint32_t item) const { return cells[item]; }
};

template <class Key>
struct Threshold {
  Key key;
  uint32_t last_tie;  // the last cell equal to it that is selected

  __device__ __forceinline__ bool selects(Key x, uint32_t cell) const {
    return x > key || (x == key && cell <= last_tie);
  }
};

template <class Key>
struct SelectSmem {
  Key segments[kMostSegments<Key>];
  Key candidate_keys[kMostCandidates<Key>];
  uint32_t candidate_cells[kMostCandidates<Key>];
  uint32_t candidates;
  DigitHistogram histogram;
};

template <class Real, bool kMasked>
__device__ __forceinline__ void find_segment_maxima(const SelectArgs<Real>& args,
                                                    const RowCells<Real, kMasked>& cells,
                                                    SelectSmem<typename OrderedKey<Real>::Key>& smem) {
  const uint32_t lane = threadIdx.x % 32, chunk_cells = 32 * args.lane_cells;
  for (uint32_t chunk = threadIdx.x / 32; chunk < args.chunks; chunk += kSelectThreads / 32) {
    const uint32_t begin = chunk * chunk_cells + lane;
    Real maximum = -INFINITY;  // of a lane without a cell, too: it raises no bound
    if (chunk * chunk_cells + chunk_cells <= args.tokens) {
#pragma unroll 8
      for (uint32_t i = 0; i < args.lane_cells; ++i) {
        maximum = OrderedKey<Real>::larger(maximum, cells.number(begin + 32 * i));
      }
    } else {
      for (uint32_t cell = begin; cell < args.tokens; cell += 32) {
        maximum = OrderedKey<Real>::larger(maximum, cells.number(cell));
      }
    }
    smem.segments[chunk * 32 + lane] = OrderedKey<Real>::of(maximum);
  }
  if (threadIdx.x == 0) smem.candidates = 0;
  __syncthreads();
}

// A warp reads a segment at a time: those that reach the bound are few and far between.
template <class Real, bool kMasked>
__device__ __forceinline__ void gather_candidates(const SelectArgs<Real>& args,
                                                  const RowCells<Real, kMasked>& cells,
                                                  typename OrderedKey<Real>::Key bound,
                                                  SelectSmem<typename OrderedKey<Real>::Key>& smem) {
  using Key = typename OrderedKey<Real>::Key;
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t chunk = threadIdx.x / 32; chunk < args.chunks; chunk += kSelectThreads / 32) {
    unsigned reaching = __ballot_sync(kFullWarp, smem.segments[chunk * 32 + lane] >= bound);
    for (; reaching != 0; reaching &= reaching - 1) {
      const uint32_t begin = chunk * 32 * args.lane_cells + __ffs(reaching) - 1;
      for (uint32_t i = lane; i < args.lane_cells; i += 32) {
        const uint32_t cell = begin + 32 * i;
        if (cell >= args.tokens) break;
        const Key key = cells.key(cell);
        if (key < bound) continue;
        const uint32_t place = atomicAdd(&smem.candidates, 1u);
        if (place < kMostCandidates<Key>) {
          smem.candidate_keys[place] = key;
          smem.candidate_cells[place] = cell;
        }
      }
    }
  }
  __syncthreads();
}

// Whether the candidates of a row are in shared memory now.
template <class Real, bool kMasked>
__device__ __forceinline__ bool find_candidates(const SelectArgs<Real>& args,
                                                const RowCells<Real, kMasked>& cells,
                                                SelectSmem<typename OrderedKey<Real>::Key>& smem) {
  using Key = typename OrderedKey<Real>::Key;
  if (args.k > args.chunks * 32 || args.k > kMostCandidates<Key>) return false;
  find_segment_maxima(args, cells, smem);
  // The bound's upper digits will do: sign, exponent and some bits let few cells pass that the rest would
  // not.
  constexpr int kBoundDigits = sizeof(Key) == 4 ? 2 : 3;
  const auto segment = [&](uint32_t i) { return smem.segments[i]; };
  const Key bound =
      kth_largest<kSelectThreads, kBoundDigits, Key>(smem.histogram, args.k, args.chunks * 32, segment).key;
  gather_candidates(args, cells, bound, smem);
  return smem.candidates <= kMostCandidates<Key>;
}

template <class Real, class Items>
__device__ __forceinline__ Threshold<typename OrderedKey<Real>::Key> find_threshold(
    const SelectArgs<Real>& args, const Items& items, DigitHistogram& histogram) {
  using Key = typename OrderedKey<Real>::Key;
  const auto key_at = [&](uint32_t i) { return items.key(i); };
  const auto found = kth_largest<kSelectThreads, sizeof(Key), Key>(histogram, args.k, items.count, key_at);
  // Without a choice PyTorch's product with the selection makes every NaN count.
  const bool every_tie = args.zero_unless_all && found.key == OrderedKey<Real>::kNaN;
  if (found.rank == found.equal || every_tie) return {found.key, UINT_MAX};
  // Of the equal cells the rank-th from below. Others are 0 here, and a cell's complement is not.
  const auto tie_at = [&](uint32_t i) { return items.key(i) == found.key ? ~items.cell(i) : 0u; };
  const auto last =
      kth_largest<kSelectThreads, sizeof(uint32_t), uint32_t>(histogram, found.rank, items.count, tie_at);
  return {found.key, ~last.key};
}

// A document's result. key is 0 where none of its cells that count is selected.
template <class Real, bool kMasked>
__device__ __forceinline__ void store_document(const SelectArgs<Real>& args,
                                               const RowCells<Real, kMasked>& cells,
                                               const Threshold<typename OrderedKey<Real>::Key>& threshold,
                                               int64_t row, uint32_t document,
                                               typename OrderedKey<Real>::Key key, int32_t token) {
  using Key = typename OrderedKey<Real>::Key;
  bool kept = key != 0;
  Real maximum = kept ? OrderedKey<Real>::number(key) : Real{0};
  if (args.zero_unless_all && (!kept || maximum <= 0)) {
    bool all = true;  // of its cells are selected, masked ones too; the first seldom is
    const uint32_t begin = document * args.Ld;
    for (uint32_t cell = begin; all && cell < begin + args.Ld; ++cell) {
      all = threshold.selects(cells.key(cell), cell);
    }
    maximum = !all ? Real{0} : kept ? maximum : OrderedKey<Real>::kLowest;
    kept = kept && all;
  }
  const int64_t at = row * args.documents + document;
  // As the integer that its memory held before: no number is read from it here.
  static_cast<Key*>(args.maxima)[at] = [&] {
    if constexpr (sizeof(Key) == 4)
      return __float_as_uint(maximum);
    else
      return static_cast<Key>(__double_as_longlong(maximum));
  }();
  args.winners[at] = kept ? token : kSentinel;
}

// From candidates: each goes to its document by atomics on the results, which the block alone uses.
template <class Real, bool kMasked>
__device__ __forceinline__ void write_documents(const SelectArgs<Real>& args,
                                                const RowCells<Real, kMasked>& cells,
                                                const Candidates<typename OrderedKey<Real>::Key>& candidates,
                                                const Threshold<typename OrderedKey<Real>::Key>& threshold,
                                                int64_t row) {
  using Key = typename OrderedKey<Real>::Key;
  Key* best = static_cast<Key*>(args.maxima) + row * args.documents;
  int32_t* tokens = args.winners + row * args.documents;
  for (uint32_t j = threadIdx.x; j < args.documents; j += kSelectThreads) {
    best[j] = 0;
    tokens[j] = INT_MAX;
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < candidates.count; i += kSelectThreads) {
    const uint32_t cell = candidates.cell(i);
    if (threshold.selects(candidates.key(i), cell) && cells.kept(cell)) {
      atomicMax(&best[cell / args.Ld], candidates.key(i));
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < candidates.count; i += kSelectThreads) {
    const uint32_t cell = candidates.cell(i), document = cell / args.Ld;
    if (threshold.selects(candidates.key(i), cell) && cells.kept(cell) &&
        __ldcg(&best[document]) == candidates.key(i)) {
      atomicMin(&tokens[document], static_cast<int32_t>(cell - document * args.Ld));
    }
  }
  __syncthreads();
  for (uint32_t j = threadIdx.x; j < args.documents; j += kSelectThreads) {
    store_document(args, cells, threshold, row, j, __ldcg(&best[j]), __ldcg(&tokens[j]));
  }
}

// From the row: a warp reads a document at a time.
template <class Real, bool kMasked>
__device__ __forceinline__ void write_documents(const SelectArgs<Real>& args,
                                                const RowCells<Real, kMasked>& cells,
                                                const RowCells<Real, kMasked>&,
                                                const Threshold<typename OrderedKey<Real>::Key>& threshold,
                                                int64_t row) {
  using Key = typename OrderedKey<Real>::Key;
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t j = threadIdx.x / 32; j < args.documents; j += kSelectThreads / 32) {
    Key best = 0;
    uint32_t token = UINT_MAX;
    for (uint32_t t = lane; t < args.Ld; t += 32) {
      const uint32_t cell = j * args.Ld + t;
      const Key key = cells.key(cell);
      if (key > best && threshold.selects(key, cell) && cells.kept(cell)) {
        best = key;
        token = t;
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const Key other = __shfl_xor_sync(kFullWarp, best, step);
      const uint32_t other_token = __shfl_xor_sync(kFullWarp, token, step);
      if (other > best || (other == best && other_token < token)) {
        best = other;
        token = other_token;
      }
    }
    if (lane == 0) store_document(args, cells, threshold, row, j, best, static_cast<int32_t>(token));
  }
}

template <class Real, bool kMasked>
__global__ void __launch_bounds__(kSelectThreads) xtr_select(const SelectArgs<Real> args) {
  using Key = typename OrderedKey<Real>::Key;
  __shared__ SelectSmem<Key> smem;
  const int64_t row = blockIdx.x;
  const RowCells<Real, kMasked> cells{args.similarities + row * args.row_stride, args.d_mask, args.tokens};
  if (find_candidates(args, cells, smem)) {
    const Candidates<Key> candidates{smem.candidate_keys, smem.candidate_cells, smem.candidates};
    const auto threshold = find_threshold(args, candidates, smem.histogram);
    write_documents(args, cells, candidates, threshold, row);
  } else {
    // Of all cells there is nothing to choose: every key is above 0.
    const auto threshold =
        args.k == args.tokens ? Threshold<Key>{0, UINT_MAX} : find_threshold(args, cells, smem.histogram);
    write_documents(args, cells, cells, threshold, row);
  }
}

}  // namespace late_interaction
