// The kernels that choose the best scores, and that make the payloads of a search's processes, as the host
// calls them. Each launch returns its error and waits for nothing. Results have the same bits on every run.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace late_interaction {

// The most that are chosen: a block sorts them in shared memory.
inline constexpr int64_t kMostBest = 1024;
// Threads of a block, and the items that it chooses from: each thread holds kLaneItems of them in registers.
inline constexpr int kTopkThreads = 512, kLaneItems = 16;
inline constexpr int64_t kSegmentItems = int64_t{kTopkThreads} * kLaneItems;

// The candidates of a row: scores, documents found before, or keys.
struct ScoreColumns {
  const float* scores;
  int64_t score_stride;    // from one row to the next
  const int64_t* indices;  // null: column i is document first + i
  int64_t index_stride;
  int64_t first;
};
struct FoundBefore {  // [rows, count] each
  const float* scores;
  const int64_t* indices;
  int64_t count;
};
struct Keys {  // `width` neighbouring keys of a row in each of several lists
  const int64_t* data;
  int64_t width;
  int64_t list_stride;
  // If processes made the lists, keys are int64 in the same order, with indices from 0 in each list, and list
  // i has counts[i * list_stride] documents. Else null.
  const int64_t* counts;
  int64_t lists;
};
inline constexpr int64_t kMostLists = 1024;

struct BestOutput {
  float* scores;  // [rows, k], best first
  int64_t* indices;
};

struct Selection {
  int64_t rows, items;  // items of a row, without documents found before
  int64_t k;            // 1 to kMostBest, and no more than there are documents
  bool largest;
};

int64_t segments_of(int64_t items);

// With keys: writes the k best of each of the equal segments of a row there, in any order, int64 [rows,
// segments, room], filled up with keys of no document. Else the k best of at most kSegmentItems items and
// those found before, to `best`. From: ScoreColumns or Keys.
template <class From>
cudaError_t launch_select(const Selection& call, const From& from, const FoundBefore& found, int64_t room,
                          int64_t* keys, const BestOutput& best, cudaStream_t stream);

// Numbers behind a process's keys.
struct Notes {
  static constexpr int kMost = 16;
  int64_t values[kMost];
  int count;
};

// A process's payload, int64 [size]: [rows, width] keys, of `found` and then of no document; then zeros; at
// the end the notes.
struct PackArgs {
  FoundBefore found;
  int64_t rows, width, size;
  bool largest;
  Notes notes;
  int64_t* packed;
};
cudaError_t launch_pack_found(const PackArgs& args, cudaStream_t stream);

// sum += factor * (the sum over i of byte i times (i % 8191 + 1)), modulo 2^64.
cudaError_t launch_add_checksum(const void* bytes, int64_t count, uint64_t factor, int64_t* sum,
                                cudaStream_t stream);

}  // namespace late_interaction
