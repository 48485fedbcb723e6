// XTR's selection: which documents the k largest similarities of a query token lie in. One block a row.
//
//   row         |......|......|......|   one query token's similarities with the tokens of all documents
//   segments    |  max |  max |  max |   up to 4096 of them, in shared memory; the k-th largest is a lower
//                                        bound of the threshold, since at least k cells reach it
//   candidates   . .      .    . . .     the cells that reach it, little more than k, in shared memory
//   threshold                            the k-th largest of these, exactly
//   documents   |max, token|  ...        of those with a selected cell
//
// So almost every cell is read once, at one instruction for its maximum; only segments whose maximum reaches
// the bound are read again. Where k is more than the segments, or the candidates do not fit (many equal
// cells), the threshold is found in the row itself, which then is read once for each digit.
//
// If the row holds the rounded maxima of groups of cells, groups are the candidates first; then the cells of
// groups that reach the bound, computed in float32. A search in the row itself computes all cells, for each
// digit.
#pragma once

#include <climits>
#include <cstdint>

#include "../primitives/kth_largest.cuh"
#include "../ptx/before_sm80.cuh"
#include "cells.cuh"

namespace late_interaction {

// Threads of a block, and blocks of a multiprocessor without spilled registers: keys of 64 bits and products
// take more registers. Rows of groups are short, so more of them at once hide each other's latency.
template <class Element>
inline constexpr int kSelectThreads = Panel<Element>::kGroups ? 256 : 512;
template <class Element>
inline constexpr int kSelectBlocks = ptx::kThreadsPerSm < 2048 ? 1024 / kSelectThreads<Element>
                                     : Panel<Element>::kGroups ? 5
                                     : sizeof(Element) == 8    ? 3
                                                               : 4;

// Both fit in the 48 KiB of shared memory that need no opt-in.
template <class Key>
inline constexpr uint32_t kMostSegments = 16384 / sizeof(Key);
template <class Key>
inline constexpr uint32_t kMostCandidates = 24576 / (sizeof(Key) + sizeof(uint32_t));

template <class Element>
struct SelectArgs {
  const Element* similarities;
  int64_t row_stride;
  const Element* queries;    // [rows, d] and
  const Element* documents;  // [tokens, d], of a panel of groups
  uint32_t d;
  const uint8_t* d_mask;  // with kMasked
  uint32_t document_count, Ld, tokens, k;
  uint32_t items;       // of a row: cells or groups
  uint32_t lane_packs;  // of a segment: a lane's share of a chunk of 32 * lane_packs consecutive packs
  uint32_t chunks;
  bool zero_unless_all;
  void* maxima;  // [rows, document_count] of Real; of keys until all candidates have been seen
  int32_t* winners;
};

template <class Key>
struct SelectSmem {
  Key segments[kMostSegments<Key>];
  Key candidate_keys[kMostCandidates<Key>];
  uint32_t candidate_cells[kMostCandidates<Key>];
  uint32_t candidates;
  uint32_t listed;  // number of listed segments (over the histogram); then of listed groups (over segments)
  DigitHistogram histogram;

  // Segments whose maximum reaches the bound; they share memory with the histogram.
  static constexpr uint32_t kMostListed = sizeof(DigitHistogram::counts) / sizeof(uint16_t);
  static_assert(kMostSegments<Key> <= 1 << 16);
  __device__ __forceinline__ uint16_t* listed_segments() {
    return reinterpret_cast<uint16_t*>(histogram.counts);
  }
};

// Only a bound's upper digits are found: sign, exponent and some bits let few further cells pass.
template <class Key>
inline constexpr int kBoundDigits = sizeof(Key) == 4 ? 2 : 3;

// items: RowCells or RowGroups.
template <class Element, class Items, class Key>
__device__ __forceinline__ void find_segment_maxima(const SelectArgs<Element>& args, const Items& items,
                                                    SelectSmem<Key>& smem) {
  using Cell = Panel<Element>;
  constexpr uint32_t kAtOnce = 4, kWarps = kSelectThreads<Element> / 32;
  const uint32_t lane = threadIdx.x % 32, chunk_packs = 32 * args.lane_packs;
  const uint32_t packs = args.items / Cell::kPackItems;
  const auto store = [&](uint32_t chunk, const auto& maximum) {
    smem.segments[chunk * 32 + lane] = OrderedKey<typename Cell::Real>::of(Cell::largest(maximum));
  };
  uint32_t chunk = threadIdx.x / 32;
  const auto several_chunks = [&]<uint32_t kPacks>() {  // at once, to wait for memory less often
    constexpr uint32_t kChunks = kAtOnce / kPacks;
    for (; chunk + (kChunks - 1) * kWarps < packs / (32 * kPacks); chunk += kChunks * kWarps) {
      typename Cell::Pack loaded[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        loaded[i] = items.pack(((chunk + i / kPacks * kWarps) * kPacks + i % kPacks) * 32 + lane);
      }
#pragma unroll
      for (uint32_t i = 0; i < kChunks; ++i) {
        auto maximum = loaded[i * kPacks];
        if constexpr (kPacks == 2) maximum = Cell::larger(maximum, loaded[i * kPacks + 1]);
        store(chunk + i * kWarps, maximum);
      }
    }
  };
  if (args.lane_packs == 1) several_chunks.template operator()<1>();
  if (args.lane_packs == 2) several_chunks.template operator()<2>();
  for (; chunk < args.chunks; chunk += kWarps) {
    const uint32_t begin = chunk * chunk_packs + lane;
    auto maximum = Cell::none();  // a lane without a cell keeps it, which raises no bound
    if (chunk * chunk_packs + chunk_packs <= packs) {
#pragma unroll(Cell::kGroups ? 2 : 8)
      for (uint32_t i = 0; i < args.lane_packs; ++i) {
        maximum = Cell::larger(maximum, items.pack(begin + 32 * i));
      }
    } else {
      for (uint32_t at = begin; at < packs; at += 32) maximum = Cell::larger(maximum, items.pack(at));
    }
    store(chunk, maximum);
  }
  if (threadIdx.x == 0) smem.candidates = smem.listed = 0;
  __syncthreads();
}

// Lists the segments that reach the bound. Returns how many: more than kMostListed are not all listed.
template <class Element, class Key>
__device__ __forceinline__ uint32_t list_segments(const SelectArgs<Element>& args, Key bound,
                                                  SelectSmem<Key>& smem) {
  for (uint32_t i = threadIdx.x; i < args.chunks * 32; i += kSelectThreads<Element>) {
    if (smem.segments[i] < bound) continue;
    const uint32_t slot = atomicAdd(&smem.listed, 1u);
    if (slot < smem.kMostListed) smem.listed_segments()[slot] = static_cast<uint16_t>(i);
  }
  __syncthreads();
  return smem.listed;
}

// Adds items that reach the bound to the candidates (groups, of RowGroups). A thread reads a segment, several
// of its packs at once; listed segments have a thread each, so that all wait for memory together.
template <class Element, class Items, class Key>
__device__ __forceinline__ void gather_candidates(const SelectArgs<Element>& args, const Items& items,
                                                  Key bound, SelectSmem<Key>& smem) {
  using Cell = Panel<Element>;
  constexpr uint32_t kAtOnce = 2, kItems = Cell::kPackItems;
  const uint32_t packs = args.items / kItems, listed = list_segments(args, bound, smem);
  const bool all_listed = listed <= smem.kMostListed;
  for (uint32_t n = threadIdx.x; n < (all_listed ? listed : args.chunks * 32); n += kSelectThreads<Element>) {
    const uint32_t segment = all_listed ? smem.listed_segments()[n] : n;
    if (smem.segments[segment] < bound) continue;
    const uint32_t begin = segment / 32 * 32 * args.lane_packs + segment % 32;
    const uint32_t end = min((segment / 32 + 1) * 32 * args.lane_packs, packs);
    for (uint32_t first = begin; first < end; first += 32 * kAtOnce) {
      typename Cell::Pack loaded[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) loaded[i] = items.pack(min(first + 32 * i, end - 1));
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce * kItems; ++i) {
        const uint32_t pack = first + i / kItems * 32;
        const Key key = OrderedKey<typename Cell::Real>::of(Cell::item(loaded[i / kItems], i % kItems));
        if (pack >= end || key < bound) continue;
        const uint32_t slot = atomicAdd(&smem.candidates, 1u);
        if (slot < kMostCandidates<Key>) {
          smem.candidate_keys[slot] = key;
          smem.candidate_cells[slot] = pack * kItems + i % kItems;
        }
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) smem.listed = 0;
}

// Finds the candidates of a row. Returns whether shared memory holds them all.
template <class Element, class Items, class Key>
__device__ __forceinline__ bool find_candidates(const SelectArgs<Element>& args, const Items& items,
                                                SelectSmem<Key>& smem) {
  if (args.k > min(args.chunks * 32, args.items) || args.k > kMostCandidates<Key>) return false;
  find_segment_maxima(args, items, smem);
  const auto segment = [&](uint32_t i) { return smem.segments[i]; };
  const auto bound = kth_largest<kSelectThreads<Element>, kBoundDigits<Key>, Key>(smem.histogram, args.k,
                                                                                  args.chunks * 32, segment);
  gather_candidates(args, items, bound.key, smem);
  return smem.candidates <= kMostCandidates<Key>;
}

// Lists the candidate groups that reach their k-th largest maximum, or a little less. Returns that bound.
template <class Element>
__device__ __forceinline__ uint32_t list_groups(const SelectArgs<Element>& args, SelectSmem<uint32_t>& smem) {
  const auto key_at = [&](uint32_t i) { return smem.candidate_keys[i]; };
  const uint32_t bound = kth_largest<kSelectThreads<Element>, kBoundDigits<uint32_t>, uint32_t>(
                             smem.histogram, args.k, smem.candidates, key_at)
                             .key;
  for (uint32_t i = threadIdx.x; i < smem.candidates; i += kSelectThreads<Element>) {
    if (smem.candidate_keys[i] >= bound) {
      smem.segments[atomicAdd(&smem.listed, 1u)] = smem.candidate_cells[i];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) smem.candidates = 0;
  __syncthreads();
  return bound;
}

// Sums four numbers over 16 lanes; lane l returns the sum of number l / 4 % 4. Terms are added in the order
// of a tree of shuffles for each number.
__device__ __forceinline__ float sums_of_lanes(const float (&shares)[4], uint32_t lane) {
  const auto exchange = [](bool upper, float a, float b, int step) {
    return (upper ? b : a) + __shfl_xor_sync(kFullWarp, upper ? a : b, step);
  };
  const float even = exchange(lane & 8, shares[0], shares[2], 8);
  const float odd = exchange(lane & 8, shares[1], shares[3], 8);
  float sum = exchange(lane & 4, even, odd, 4);
  sum += __shfl_xor_sync(kFullWarp, sum, 2);
  return sum + __shfl_xor_sync(kFullWarp, sum, 1);
}

// Adds cells to the candidates. Four lanes hold the same cell, and lane l ^ 16 the group's other cell.
template <class Element, bool kMasked>
__device__ __forceinline__ void add_candidates(const ExactCells<Element, kMasked>& cells,
                                               SelectSmem<uint32_t>& smem, uint32_t cell, float product) {
  const bool exists = cell < cells.count;
  const uint32_t key = exists ? cells.key_of(cell, product) : 0;
  const uint32_t largest = max(key, __shfl_xor_sync(kFullWarp, key, 16));
  const float rounded = widen(narrow<Element>(OrderedKey<float>::number(key)));
  const bool reaches = key == largest || OrderedKey<float>::of(rounded) >= cells.bound;
  if (!exists || !reaches || threadIdx.x % 4 != 0) return;
  const uint32_t slot = atomicAdd(&smem.candidates, 1u);
  if (slot < kMostCandidates<uint32_t>) {
    smem.candidate_keys[slot] = key;
    smem.candidate_cells[slot] = cell;
  }
}

// Adds the cells of listed groups that round to the bound or more to the candidates. A warp multiplies the
// cells of four groups at once, to wait for memory less often. The larger cell of a group is a candidate in
// any case, since a sum in another order may round to less: so there are at least k. Returns whether they
// fit.
template <class Element, bool kMasked>
__device__ __forceinline__ bool multiply_groups(const ExactCells<Element, kMasked>& cells,
                                                SelectSmem<uint32_t>& smem) {
  constexpr uint32_t kLanes = ExactCells<Element, kMasked>::kLanes, kAtOnce = 4;
  constexpr uint32_t kWarps = kSelectThreads<Element> / 32;
  static_assert(kGroupCells == 2 && kLanes == 16);
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t first = threadIdx.x / 32; first < smem.listed; first += kAtOnce * kWarps) {
    uint32_t cell[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = first + i * kWarps;
      cell[i] = at < smem.listed ? cell_of_group(smem.segments[at], lane / kLanes) : UINT_MAX;
    }
    float shares[kAtOnce];
    cells.share(cell, lane % kLanes, shares);
    const uint32_t even = lane & 8 ? cell[2] : cell[0], odd = lane & 8 ? cell[3] : cell[1];
    add_candidates(cells, smem, lane & 4 ? odd : even, sums_of_lanes(shares, lane));
  }
  __syncthreads();
  return smem.candidates <= kMostCandidates<uint32_t>;
}

template <class Element, class Items>
__device__ __forceinline__ auto find_threshold(const SelectArgs<Element>& args, const Items& items,
                                               DigitHistogram& histogram) {
  using Real = typename Panel<Element>::Real;
  using Key = typename OrderedKey<Real>::Key;
  const auto key_at = [&](uint32_t i) { return items.key(i); };
  const auto found =
      kth_largest<kSelectThreads<Element>, sizeof(Key), Key>(histogram, args.k, items.count, key_at);
  // PyLate multiplies similarities by the selection, and NaN * 0 is NaN: every NaN counts, selected or not.
  const bool every_tie = args.zero_unless_all && found.key == OrderedKey<Real>::kNaN;
  if (found.rank == found.equal || every_tie) return Threshold<Key>{found.key, UINT_MAX};
  // The last tie that is selected is the rank-th lowest of the equal cells. The search is for a largest key,
  // so the key of an equal cell is the complement of its index here, and the key of another cell 0.
  const auto tie_at = [&](uint32_t i) { return items.key(i) == found.key ? ~items.cell(i) : 0u; };
  const auto last = kth_largest<kSelectThreads<Element>, sizeof(uint32_t), uint32_t>(histogram, found.rank,
                                                                                     items.count, tie_at);
  return Threshold<Key>{found.key, ~last.key};
}

template <class Real>
__device__ __forceinline__ typename OrderedKey<Real>::Key bits_of(Real x) {
  if constexpr (sizeof(Real) == 4) {
    return __float_as_uint(x);
  } else {
    return static_cast<typename OrderedKey<Real>::Key>(__double_as_longlong(x));
  }
}

// Writes a document's result. key is 0 where none of its cells that count is selected.
template <class Element, class Cells, class Key>
__device__ __forceinline__ void store_document(const SelectArgs<Element>& args, const Cells& cells,
                                               const Threshold<Key>& threshold, int64_t row,
                                               uint32_t document, Key key, int32_t token) {
  using Real = typename Panel<Element>::Real;
  bool kept = key != 0;
  Real maximum = kept ? OrderedKey<Real>::number(key) : Real{0};
  if (args.zero_unless_all && (!kept || maximum <= 0)) {
    bool all = true;  // all cells of the document are selected, masked ones too; the first seldom is
    const uint32_t begin = document * args.Ld;
    for (uint32_t cell = begin; all && cell < begin + args.Ld; ++cell) {
      all = cells.may_reach_threshold(cell) && threshold.selects(cells.key(cell), cell);
    }
    maximum = !all ? Real{0} : kept ? maximum : OrderedKey<Real>::kLowest;
    kept = kept && all;
  }
  const int64_t at = row * args.document_count + document;
  static_cast<Key*>(args.maxima)[at] = bits_of(maximum);  // this memory may hold keys, so it keeps their type
  args.winners[at] = kept ? token : kSentinel;
}

// The best key and token of each document so far, for one block. They overwrite the segments if they fit;
// else they lie in the results, and are read past L1, which atomics do not update.
template <class Key, bool kShared>
struct DocumentBests {
  Key* keys;
  int32_t* tokens;

  __device__ __forceinline__ Key key(uint32_t j) const { return kShared ? keys[j] : __ldcg(&keys[j]); }
  __device__ __forceinline__ int32_t token(uint32_t j) const {
    return kShared ? tokens[j] : __ldcg(&tokens[j]);
  }
};

// Writes the documents from candidates, each of which goes to its document by atomics.
template <class Element, class Cells, class Key, bool kShared>
__device__ __forceinline__ void write_documents(const SelectArgs<Element>& args, const Cells& cells,
                                                const Candidates<Key>& candidates,
                                                const Threshold<Key>& threshold, int64_t row,
                                                const DocumentBests<Key, kShared>& best) {
  constexpr uint32_t kThreads = kSelectThreads<Element>;
  for (uint32_t j = threadIdx.x; j < args.document_count; j += kThreads) {
    best.keys[j] = 0;
    best.tokens[j] = INT_MAX;
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < candidates.count; i += kThreads) {
    const uint32_t cell = candidates.cell(i);
    if (threshold.selects(candidates.key(i), cell) && cells.kept(cell)) {
      atomicMax(&best.keys[cell / args.Ld], candidates.key(i));
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < candidates.count; i += kThreads) {
    const uint32_t cell = candidates.cell(i), document = cell / args.Ld;
    if (threshold.selects(candidates.key(i), cell) && cells.kept(cell) &&
        best.key(document) == candidates.key(i)) {
      atomicMin(&best.tokens[document], static_cast<int32_t>(cell - document * args.Ld));
    }
  }
  __syncthreads();
  for (uint32_t j = threadIdx.x; j < args.document_count; j += kThreads) {
    store_document(args, cells, threshold, row, j, best.key(j), best.token(j));
  }
}

// Writes the documents from the row: a warp reads a document at a time.
template <class Element, class Cells, class Key>
__device__ __forceinline__ void write_documents(const SelectArgs<Element>& args, const Cells& cells,
                                                const Threshold<Key>& threshold, int64_t row) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t j = threadIdx.x / 32; j < args.document_count; j += kSelectThreads<Element> / 32) {
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

template <class Element, class Cells, class Key>
__device__ __forceinline__ void select_in_row(const SelectArgs<Element>& args, const Cells& cells,
                                              SelectSmem<Key>& smem, int64_t row) {
  // If all cells are selected, the threshold is 0: every key is above it.
  const auto threshold =
      args.k == args.tokens ? Threshold<Key>{0, UINT_MAX} : find_threshold(args, cells, smem.histogram);
  write_documents(args, cells, threshold, row);
}

// Selects among the candidates in shared memory if they were found, else among all cells.
template <class Element, class Cells, class Key>
__device__ __forceinline__ void select_and_write(const SelectArgs<Element>& args, const Cells& cells,
                                                 SelectSmem<Key>& smem, bool found) {
  const int64_t row = blockIdx.x;
  if (found) {
    const Candidates<Key> candidates{smem.candidate_keys, smem.candidate_cells, smem.candidates};
    const auto threshold = find_threshold(args, candidates, smem.histogram);
    const uint32_t documents = args.document_count;
    if (documents <= sizeof(smem.segments) / (sizeof(Key) + sizeof(int32_t))) {
      auto* tokens = reinterpret_cast<int32_t*>(smem.segments + documents);
      write_documents(args, cells, candidates, threshold, row,
                      DocumentBests<Key, true>{smem.segments, tokens});
    } else {
      const int64_t first = row * documents;
      write_documents(
          args, cells, candidates, threshold, row,
          DocumentBests<Key, false>{static_cast<Key*>(args.maxima) + first, args.winners + first});
    }
  } else {
    select_in_row(args, cells, smem, row);
  }
}

template <class Element, bool kMasked>
__global__ void __launch_bounds__(kSelectThreads<Element>, kSelectBlocks<Element>)
    xtr_select(const SelectArgs<Element> args) {
  using Key = typename OrderedKey<typename Panel<Element>::Real>::Key;
  __shared__ SelectSmem<Key> smem;
  const int64_t row = blockIdx.x;
  const Element* items = args.similarities + row * args.row_stride;
  if constexpr (Panel<Element>::kGroups) {
    const RowGroups<Element> groups{items, args.items};
    ExactCells<Element, kMasked> cells{
        groups, args.d_mask, args.queries + row * args.d, args.documents, args.d, 0, args.tokens};
    bool found = find_candidates(args, groups, smem);
    if (found) {
      cells.bound = list_groups(args, smem);
      // Maxima that are not of these products may promise more cells than there are.
      found = multiply_groups(cells, smem) && smem.candidates >= args.k;
      if (!found) cells.bound = 0;
    }
    select_and_write(args, cells, smem, found);
  } else {
    const RowCells<Element, kMasked> cells{items, args.d_mask, args.tokens};
    select_and_write(args, cells, smem, find_candidates(args, cells, smem));
  }
}

}  // namespace late_interaction
