// Ward's clustering of documents' tokens on a GPU, a block a document (D. Müllner, arXiv 1109.2378). The
// steps, and the rules for ties, are those of csrc/cpu/pooling.cpp:
//
//   distances   [n, n] doubles in the workspace of the block; at first both halves, so a row is contiguous
//   chain       a row's minimum by all threads: a scan, one barrier. A cluster's nearest stays known until
//               that cluster is joined to another; then a scan finds it again, when the chain needs it
//   join        the union's row by all threads: three barriers
//   cut         merges ranked by all threads; the tree, of n nodes, by one
//
// A join writes the union's row, and no column: of the two copies of a distance the one in the row that was
// written last is valid, as the rows' stamps say. A scan copies the distances of younger rows to its row,
// which then is the youngest.
//
//              x        y                 A cluster x that is scanned after y has been written reads its
//        x  [  .  ...  old  ... ]         distance from y in row y.
//        y  [ new ...   .   ... ]
//
// Some 2 or 3 n scans and n joins follow one another, and the distances of all documents do not fit into L2.
// Products and sums are rounded one by one: fused multiply-adds would find other clusters than scipy.
#pragma once

#include <cstdint>

namespace late_interaction {

inline constexpr int kWardThreads = 128;
inline constexpr int kWardBatch = 9;  // loads that a thread has in flight: with 128 threads, a row of 1,152
// Blocks of a multiprocessor, without spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int kWardBlocks = 3;
#else
inline constexpr int kWardBlocks = 4;
#endif
inline constexpr int kWardTile = 32;  // rows and columns that are mirrored at a time

template <class Real>
struct WardArgs {
  const Real* similarities;
  const int32_t* offsets;   // [documents + 1]
  const int32_t* clusters;  // [documents]
  int32_t* labels;
  int32_t* found;  // [documents] -1: there is NaN, or the document lies outside of its tensors
  int32_t documents;
  int64_t tokens, cells;     // that labels and similarities hold
  double* distances;         // [blocks, longest * longest]
  struct WardMerge* merges;  // [blocks, longest]
  char* state;               // [blocks, state_bytes], or null: in shared memory
  int64_t longest;
  int64_t state_bytes;
};

struct WardMerge {
  double distance;
  int32_t x, y;  // tokens that stand for the two clusters, x the lower
};

// Bytes of state, beside its distances, for a document of n tokens.
inline __host__ __device__ int64_t ward_state_bytes(int64_t n) { return 32 * n; }

// The clusters while merges are found.
struct WardClusters {
  double* nearest_distance;  // [n]
  double* chain_distance;    // [n] from a cluster of the chain to the previous one
  int32_t* nearest;          // [n] the nearest cluster; -1: not known
  int32_t* stamp;            // [n] of a cluster's row: higher in younger rows
  int32_t* size;             // [n] tokens of a cluster; 0: it is dead
  int32_t* chain;            // [n]

  __device__ WardClusters(char* memory, int32_t n)
      : nearest_distance(reinterpret_cast<double*>(memory)),
        chain_distance(nearest_distance + n),
        nearest(reinterpret_cast<int32_t*>(chain_distance + n)),
        stamp(nearest + n),
        size(stamp + n),
        chain(size + n) {}
};

// The tree of merges while it is cut, in the same memory.
struct WardState {
  double* merge_distance;  // [n]
  int32_t* merge_x;        // [n] nodes of the tree, x the lower
  int32_t* merge_y;
  int32_t* order;  // [n] the merges by rising distance
  int32_t* stack;  // [n]
  int32_t* nodes;  // [2n] parents, then clusters

  __device__ WardState(char* memory, int32_t n)
      : merge_distance(reinterpret_cast<double*>(memory)),
        merge_x(reinterpret_cast<int32_t*>(merge_distance + n)),
        merge_y(merge_x + n),
        order(merge_y + n),
        stack(order + n),
        nodes(stack + n) {}
};

struct Nearest {
  double distance;
  int32_t token;

  __device__ bool operator<(const Nearest& other) const {
    return distance < other.distance || (distance == other.distance && token < other.token);
  }
};

// The nearest of all threads. of_warps: two sets, used in turn, so that one barrier is enough.
__device__ inline Nearest nearest_of_block(Nearest nearest, Nearest (*of_warps)[kWardThreads / 32],
                                           int& turn) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Nearest other{__shfl_xor_sync(0xFFFFFFFFu, nearest.distance, offset),
                        __shfl_xor_sync(0xFFFFFFFFu, nearest.token, offset)};
    if (other < nearest) nearest = other;
  }
  turn ^= 1;
  if (threadIdx.x % 32 == 0) of_warps[turn][threadIdx.x / 32] = nearest;
  __syncthreads();
  nearest = of_warps[turn][0];
#pragma unroll
  for (int warp = 1; warp < kWardThreads / 32; ++warp) {
    const Nearest other = of_warps[turn][warp];
    if (other < nearest) nearest = other;
  }
  return nearest;
}

// Computes a document's distances, from the similarities above the diagonal, and mirrors them. Returns false,
// to every thread, if there is NaN. tile: [32][33] in shared memory.
template <class Real>
__device__ bool read_distances(const Real* similarities, double* distances, int64_t n, Real* tile) {
  constexpr int kPitch = kWardTile + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  bool has_nan = false;
  for (int64_t row = 0; row < n; row += kWardTile) {
    for (int64_t column = row; column < n; column += kWardTile) {
      const int64_t j = column + lane;
      for (int r = warp; r < kWardTile; r += kWardThreads / 32) {
        const int64_t i = row + r;
        if (j >= n || i >= j) continue;
        Real distance = Real{1} - similarities[i * n + j];
        has_nan |= distance != distance;
        distance = distance < Real{0} ? Real{0} : distance;
        distance = distance > Real{2} ? Real{2} : distance;
        distances[i * n + j] = static_cast<double>(distance);
        tile[r * kPitch + lane] = distance;
      }
      __syncthreads();
      for (int c = warp; c < kWardTile; c += kWardThreads / 32) {
        const int64_t i = row + lane, to = column + c;
        if (to < n && i < to) distances[to * n + i] = static_cast<double>(tile[lane * kPitch + c]);
      }
      __syncthreads();
    }
  }
  return __syncthreads_or(has_nan) == 0;
}

__device__ inline double joined_distance(double d_x, double d_y, double d_xy, int x, int y, int size) {
  const double t = __ddiv_rn(1.0, static_cast<double>(x + y + size));
  const double of_x = __dmul_rn(__dmul_rn(__dmul_rn(static_cast<double>(size + x), t), d_x), d_x);
  const double of_y = __dmul_rn(__dmul_rn(__dmul_rn(static_cast<double>(size + y), t), d_y), d_y);
  const double between = __dmul_rn(__dmul_rn(__dmul_rn(static_cast<double>(size), t), d_xy), d_xy);
  return __dsqrt_rn(__dsub_rn(__dadd_rn(of_x, of_y), between));
}

// Finds the merges of a document. All threads of the block call all of its functions.
struct WardChain {
  double* distances;
  WardClusters state;
  int32_t n;
  Nearest (*of_warps)[kWardThreads / 32];
  int turn = 0;
  int32_t clock = 0;

  __device__ WardChain(double* distances_, char* memory, int32_t n_, Nearest (*of_warps_)[kWardThreads / 32])
      : distances(distances_), state(memory, n_), n(n_), of_warps(of_warps_) {
    for (int32_t i = threadIdx.x; i < n; i += kWardThreads) {
      state.size[i] = 1;
      state.stamp[i] = 0;
      state.nearest[i] = -1;
    }
    __syncthreads();
  }

  __device__ double* row(int32_t x) const { return distances + static_cast<int64_t>(x) * n; }

  // Cluster x's nearest, the lowest of equals.
  __device__ Nearest scan(int32_t x) {
    double* row_x = row(x);
    const int32_t stamp = state.stamp[x];
    Nearest nearest{__longlong_as_double(0x7FF0000000000000), INT32_MAX};
    for (int32_t base = threadIdx.x; base < n; base += kWardThreads * kWardBatch) {
      double distance[kWardBatch];
      bool lives[kWardBatch], younger[kWardBatch];
#pragma unroll
      for (int b = 0; b < kWardBatch; ++b) {
        const int32_t i = base + b * kWardThreads;
        lives[b] = i < n && i != x && state.size[i] != 0;
        younger[b] = lives[b] && state.stamp[i] > stamp;
        if (lives[b]) distance[b] = *(younger[b] ? row(i) + x : row_x + i);
      }
#pragma unroll
      for (int b = 0; b < kWardBatch; ++b) {
        const int32_t i = base + b * kWardThreads;
        if (lives[b] && distance[b] < nearest.distance) nearest = {distance[b], i};
        if (younger[b]) row_x[i] = distance[b];
      }
    }
    nearest = nearest_of_block(nearest, of_warps, turn);
    ++clock;
    if (static_cast<int32_t>(threadIdx.x) ==
        x % kWardThreads) {  // the only thread that reads the stamp before a barrier
      state.stamp[x] = clock;
      state.nearest[x] = nearest.token;
      state.nearest_distance[x] = nearest.distance;
    }
    return nearest;
  }

  // Updates cluster i's nearest. joined: the distance of i from the union of x and y, which becomes cluster
  // y.
  __device__ void keep_nearest(int32_t i, int32_t x, int32_t y, double joined) {
    const int32_t nearest = state.nearest[i];
    if (nearest < 0) return;
    if (Nearest{joined, y} < Nearest{state.nearest_distance[i], nearest + 1}) {
      state.nearest[i] = y;
      state.nearest_distance[i] = joined;
    } else if (nearest == x || nearest == y) {
      state.nearest[i] = -1;
    }
  }

  // Joins x and y, x the lower: the union becomes cluster y.
  __device__ void join(int32_t x, int32_t y, double distance) {
    __syncthreads();
    const int32_t size_x = state.size[x], size_y = state.size[y];
    const int32_t stamp_x = state.stamp[x], stamp_y = state.stamp[y];
    Nearest nearest{__longlong_as_double(0x7FF0000000000000), INT32_MAX};
    for (int32_t base = threadIdx.x; base < n; base += kWardThreads * kWardBatch) {
      double to_x[kWardBatch], to_y[kWardBatch];
      int32_t size[kWardBatch];
#pragma unroll
      for (int b = 0; b < kWardBatch; ++b) {
        const int32_t i = base + b * kWardThreads;
        size[b] = i < n && i != x && i != y ? state.size[i] : 0;
        if (size[b] == 0) continue;
        to_x[b] = *(state.stamp[i] > stamp_x ? row(i) + x : row(x) + i);
        to_y[b] = *(state.stamp[i] > stamp_y ? row(i) + y : row(y) + i);
      }
#pragma unroll
      for (int b = 0; b < kWardBatch; ++b) {
        const int32_t i = base + b * kWardThreads;
        if (size[b] == 0) continue;
        const double joined = joined_distance(to_x[b], to_y[b], distance, size_x, size_y, size[b]);
        row(y)[i] = joined;
        if (joined < nearest.distance) nearest = {joined, i};
        keep_nearest(i, x, y, joined);
      }
    }
    nearest = nearest_of_block(nearest, of_warps, turn);
    ++clock;
    if (threadIdx.x == 0) {
      state.size[x] = 0;
      state.size[y] = size_x + size_y;
      state.stamp[y] = clock;
      state.nearest[y] = nearest.token < n ? nearest.token : -1;
      state.nearest_distance[y] = nearest.distance;
    }
    __syncthreads();
  }

  __device__ void find_merges(WardMerge* merges) {
    int32_t length = 0, first = 0;
    for (int32_t merge = 0; merge < n - 1; ++merge) {
      int32_t x, before = -1;  // the chain's last cluster, and the previous one, at distance `between`
      double between = 0.0;
      if (length == 0) {
        while (state.size[first] == 0) ++first;
        x = first;
        length = 1;
        if (threadIdx.x == 0) state.chain[0] = x;
      } else {
        x = state.chain[length - 1];
        if (length > 1) {
          before = state.chain[length - 2];
          between = state.chain_distance[length - 1];
        }
      }
      Nearest nearest;
      for (;;) {
        nearest = {state.nearest_distance[x], state.nearest[x]};
        if (nearest.token < 0) nearest = scan(x);
        if (before >= 0 && between == nearest.distance) nearest.token = before;
        if (nearest.token == before) break;
        if (threadIdx.x == 0) {
          state.chain[length] = nearest.token;
          state.chain_distance[length] = nearest.distance;
        }
        ++length;
        before = x;
        between = nearest.distance;
        x = nearest.token;
      }
      length -= 2;
      join(min(x, before), max(x, before), nearest.distance);
      if (threadIdx.x == 0) merges[merge] = {nearest.distance, min(x, before), max(x, before)};
    }
    __syncthreads();
  }
};

// order[p]: the p-th merge by distance and then by time.
__device__ inline void rank_merges(const WardState& state, int32_t merges) {
  for (int32_t m = threadIdx.x; m < merges; m += kWardThreads) {
    const double distance = state.merge_distance[m];
    int32_t rank = 0;
    for (int32_t k = 0; k < merges; ++k) {
      const double other = state.merge_distance[k];
      rank += other < distance || (other == distance && k < m);
    }
    state.order[rank] = m;
  }
}

__device__ inline int32_t root_of(int32_t* parent, int32_t node) {
  while (parent[node] != node) {
    parent[node] = parent[parent[node]];
    node = parent[node];
  }
  return node;
}

// One thread: node n + p of the tree is merge order[p], whose x and y become nodes.
__device__ inline void find_nodes(const WardState& state, int32_t n) {
  for (int32_t p = 0; p < n - 1; ++p) {
    const int32_t m = state.order[p];
    const int32_t a = root_of(state.nodes, state.merge_x[m]), b = root_of(state.nodes, state.merge_y[m]);
    state.merge_x[m] = min(a, b);
    state.merge_y[m] = max(a, b);
    state.nodes[a] = state.nodes[b] = n + p;
  }
}

// One thread: numbers clusters from the root down, of a node first the children that are merges.
__device__ inline int32_t number_clusters(const WardState& state, int32_t n, double cut, int32_t* labels) {
  int32_t count = 0, depth = 0;
  state.stack[depth++] = 2 * n - 2;
  while (depth > 0) {
    const int32_t node = state.stack[--depth];
    if (node < n) {
      labels[node] = count++;
      continue;
    }
    const int32_t m = state.order[node - n];
    if (state.merge_distance[m] <= cut) {
      state.nodes[node] = count++;
      continue;
    }
    const int32_t x = state.merge_x[m], y = state.merge_y[m];
    if (y < n) state.stack[depth++] = y;
    if (x < n) state.stack[depth++] = x;
    if (y >= n) state.stack[depth++] = y;
    if (x >= n) state.stack[depth++] = x;
  }
  return count;
}

// One thread: merges within a cluster hand the cluster's number down; a parent comes after its children.
__device__ inline void hand_down(const WardState& state, int32_t n, double cut, int32_t* labels) {
  for (int32_t p = n - 2; p >= 0; --p) {
    const int32_t m = state.order[p];
    if (state.merge_distance[m] > cut) continue;
    const int32_t cluster = state.nodes[n + p], x = state.merge_x[m], y = state.merge_y[m];
    if (x < n) {
      labels[x] = cluster;
    } else {
      state.nodes[x] = cluster;
    }
    if (y < n) {
      labels[y] = cluster;
    } else {
      state.nodes[y] = cluster;
    }
  }
}

// The offset of a document's similarities: the sum of the squares of the lengths before it. An impossible
// length counts as 0.
__device__ inline int64_t cells_before(const int32_t* offsets, int32_t from, int32_t to, int64_t longest) {
  int64_t cells = 0;
  for (int32_t i = from; i < to; ++i) {
    const int64_t n = int64_t{offsets[i + 1]} - offsets[i];
    if (n > 0 && n <= longest) cells += n * n;
  }
  return cells;
}

// True if n tokens from `first` on, whose similarities begin at `start`, lie in the tensors of the call.
template <class Real>
__device__ bool lies_within(const WardArgs<Real>& args, int64_t first, int64_t n, int64_t start,
                            int32_t clusters) {
  return 0 <= first && 0 <= n && n <= args.longest && first + n <= args.tokens &&
         start + n * n <= args.cells && clusters >= min(n, int64_t{1});
}

template <class Real>
__global__ void __launch_bounds__(kWardThreads, kWardBlocks) ward_cut(const WardArgs<Real> args) {
  extern __shared__ double shared[];
  __shared__ Nearest of_warps[2][kWardThreads / 32];
  char* memory =
      args.state == nullptr ? reinterpret_cast<char*>(shared) : args.state + blockIdx.x * args.state_bytes;
  double* distances = args.distances + blockIdx.x * args.longest * args.longest;
  int64_t start = 0;
  int32_t before = 0;
  for (int32_t document = blockIdx.x; document < args.documents; document += gridDim.x) {
    start += cells_before(args.offsets, before, document, args.longest);
    before = document;
    const int32_t first = args.offsets[document], clusters = args.clusters[document];
    const int64_t length = int64_t{args.offsets[document + 1]} - first;
    if (!lies_within(args, first, length, start, clusters)) {
      if (threadIdx.x == 0) args.found[document] = -1;
      continue;
    }
    const auto n = static_cast<int32_t>(length);
    int32_t* labels = args.labels + first;
    if (clusters >= n) {
      for (int32_t i = threadIdx.x; i < n; i += kWardThreads) labels[i] = i;
      if (threadIdx.x == 0) args.found[document] = n;
      continue;
    }
    if (!read_distances(args.similarities + start, distances, n, reinterpret_cast<Real*>(shared))) {
      for (int32_t i = threadIdx.x; i < n; i += kWardThreads) labels[i] = 0;
      if (threadIdx.x == 0) args.found[document] = -1;
      continue;
    }
    WardMerge* merges = args.merges + blockIdx.x * args.longest;
    WardChain(distances, memory, n, of_warps).find_merges(merges);
    const WardState state(memory, n);
    for (int32_t m = threadIdx.x; m < n - 1; m += kWardThreads) {
      state.merge_distance[m] = merges[m].distance;
      state.merge_x[m] = merges[m].x;
      state.merge_y[m] = merges[m].y;
    }
    __syncthreads();
    rank_merges(state, n - 1);
    for (int32_t i = threadIdx.x; i < 2 * n - 1; i += kWardThreads) state.nodes[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) {
      find_nodes(state, n);
      const double cut = state.merge_distance[state.order[n - clusters - 1]];
      args.found[document] = number_clusters(state, n, cut, labels);
      hand_down(state, n, cut, labels);
    }
    __syncthreads();
  }
}

}  // namespace late_interaction
