// Ward's clustering of documents' tokens on the CPU, a document at a time (D. Müllner, arXiv 1109.2378):
//
//   distances   [n, n] doubles: clamp(1 - similarity, 0, 2), both halves, so that a row is contiguous
//   chain       clusters, each the nearest of the previous one; two that are each other's nearest are joined
//               and leave the chain, which goes on from its new end
//   merges      n - 1 of them, in the order in which the chain found them; sorted by distance they are a tree
//   cut         merges are made in the order of distance until at most `clusters` clusters are left
//
// Clusters and their numbers are those of scipy's linkage(method="ward") and fcluster(criterion="maxclust"),
// ties included: the lowest of equally near clusters is the nearest, unless the previous one in the chain is
// as near; a union takes the number of the higher of its two; merges of one distance keep their order; and
// all merges of the cut's distance are made, so that fewer clusters may be left.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "../common/pooling_tensors.h"
#include "../common/registration.h"
#include "kernels.h"
#include "op_helpers.h"
#include "parallel.h"

namespace late_interaction::cpu {

namespace {

constexpr int64_t kTileRows = 32;  // a tile that is mirrored lies in the first cache
constexpr int64_t kTileColumns = 128;
constexpr int64_t kLeastCompacted = 64;  // rows; smaller matrices lie in a cache
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Merge {
  double distance;
  int32_t x, y;  // tokens that stand for the two clusters; then their nodes in the tree, x the lower
};

// The tree of n tokens: node n + m is merge m.
class Tree {
 public:
  Tree(Merge* merges, int64_t n, int32_t* nodes, int32_t* stack)
      : merges_(merges), n_(static_cast<int32_t>(n)), nodes_(nodes), stack_(stack) {}

  // Cuts the tree into at most `clusters`, fewer than n; returns their number.
  int32_t cut(int64_t clusters, int32_t* labels) {
    std::stable_sort(merges_, merges_ + n_ - 1,
                     [](const Merge& a, const Merge& b) { return a.distance < b.distance; });
    find_nodes();
    const double cut = merges_[n_ - clusters - 1].distance;
    const int32_t count = number_clusters(cut, labels);
    hand_down(cut, labels);
    return count;
  }

 private:
  // Merges name tokens; the tree needs the nodes that these belong to by then.
  void find_nodes() {
    int32_t* parent = nodes_;  // [2n - 1]
    for (int32_t i = 0; i < 2 * n_ - 1; ++i) parent[i] = i;
    const auto root = [&](int32_t node) {
      while (parent[node] != node) node = parent[node] = parent[parent[node]];
      return node;
    };
    for (int32_t m = 0; m < n_ - 1; ++m) {
      const int32_t x = root(merges_[m].x), y = root(merges_[m].y);
      merges_[m].x = std::min(x, y);
      merges_[m].y = std::max(x, y);
      parent[x] = parent[y] = n_ + m;
    }
  }

  // Walks from the root down, and numbers clusters as it meets them; of a node's children, merges come before
  // tokens.
  int32_t number_clusters(double cut, int32_t* labels) {
    int32_t count = 0;
    int64_t depth = 0;
    stack_[depth++] = 2 * n_ - 2;
    while (depth > 0) {
      const int32_t node = stack_[--depth];
      if (node < n_) {
        labels[node] = count++;
        continue;
      }
      const Merge& merge = merges_[node - n_];
      if (merge.distance <= cut) {
        nodes_[node] = count++;
        continue;
      }
      for (int32_t child : {merge.y, merge.x}) {
        if (child < n_) stack_[depth++] = child;
      }
      for (int32_t child : {merge.y, merge.x}) {
        if (child >= n_) stack_[depth++] = child;
      }
    }
    return count;
  }

  // Gives the children of merges within a cluster the cluster's number; a parent comes after its children.
  void hand_down(double cut, int32_t* labels) {
    for (int32_t m = n_ - 2; m >= 0; --m) {
      if (merges_[m].distance > cut) continue;
      for (int32_t child : {merges_[m].x, merges_[m].y}) {
        (child < n_ ? labels[child] : nodes_[child]) = nodes_[n_ + m];
      }
    }
  }

  Merge* merges_;
  int32_t n_;
  int32_t* nodes_;  // [2n - 1] parents, then clusters
  int32_t* stack_;  // [2n]
};

template <class Real>
class WardClusterer {
 public:
  WardClusterer(const WardCut& call, const int64_t* starts, std::atomic<bool>& finite)
      : call_(call), starts_(starts), finite_(finite), rows_(kernels().ward) {}

  void operator()(int64_t document) {
    const int64_t first = call_.offsets[document], clusters = call_.clusters[document];
    n_ = call_.offsets[document + 1] - first;
    int32_t* labels = call_.labels + first;
    if (clusters >= n_) {
      for (int64_t i = 0; i < n_; ++i) labels[i] = static_cast<int32_t>(i);
      call_.found[document] = static_cast<int32_t>(n_);
      return;
    }
    thread_scratch().start(Array{n_ * n_, distances_}, Array{n_, sizes_}, Array{n_, dead_},
                           Array{n_, merges_}, Array{2 * n_, nodes_}, Array{2 * n_, stack_},
                           Array{2 * n_, tokens_}, Array{2 * n_, chain_}, Array{2 * n_, live_});
    if (!read_distances(static_cast<const Real*>(call_.similarities) + starts_[document])) {
      finite_ = false;
      return;
    }
    find_merges();
    call_.found[document] = Tree(merges_, n_, nodes_, stack_).cut(clusters, labels);
  }

 private:
  // Reads a tile above the diagonal at a time, and writes its mirror image below. Returns false for NaN.
  bool read_distances(const Real* similarities) {
    bool has_nan = false;
    for (int64_t row = 0; row < n_; row += kTileRows) {
      for (int64_t column = row; column < n_; column += kTileColumns) {
        has_nan |= read_tile(similarities, row, column);
      }
    }
    for (int64_t i = 0; i < n_; ++i) distances_[i * n_ + i] = kInfinity;
    return !has_nan;
  }

  // Returns true if there is NaN above the diagonal.
  bool read_tile(const Real* similarities, int64_t row, int64_t column) {
    const int64_t rows = std::min(kTileRows, n_ - row), columns = std::min(kTileColumns, n_ - column);
    Real tile[kTileRows][kTileColumns];
    bool has_nan = false;
    for (int64_t i = 0; i < rows; ++i) {
      const Real* given = similarities + (row + i) * n_ + column;
      const int64_t first = std::max(row + i + 1 - column, int64_t{0});
      int bad = 0;
      for (int64_t j = first; j < columns; ++j) {
        Real distance = Real{1} - given[j];
        bad |= distance != distance;
        distance = distance < Real{0} ? Real{0} : distance;
        tile[i][j] = distance > Real{2} ? Real{2} : distance;
      }
      has_nan |= bad != 0;
      double* out = distances_ + (row + i) * n_ + column;
      for (int64_t j = first; j < columns; ++j) out[j] = tile[i][j];
    }
    for (int64_t j = 0; j < columns; ++j) {
      double* out = distances_ + (column + j) * n_ + row;
      const int64_t end = std::min(rows, column + j - row);
      for (int64_t i = 0; i < end; ++i) out[i] = tile[i][j];
    }
    return has_nan;
  }

  void find_merges() {
    width_ = live_count_ = n_;
    for (int64_t i = 0; i < n_; ++i) {
      sizes_[i] = 1;
      dead_[i] = 0;
      tokens_[i] = live_[i] = static_cast<int32_t>(i);
    }
    int64_t length = 0;
    for (int64_t m = 0; m < n_ - 1; ++m) {
      if (2 * live_count_ <= width_ && width_ > kLeastCompacted) compact(length);
      if (length == 0) chain_[length++] = live_[0];
      int64_t x, y;
      double distance;
      for (;;) {
        x = chain_[length - 1];
        const int64_t before = length > 1 ? chain_[length - 2] : -1;
        y = nearest(x, before, distance);
        if (y == before) break;
        chain_[length++] = static_cast<int32_t>(y);
      }
      length -= 2;
      if (x > y) std::swap(x, y);
      merges_[m] = {distance, tokens_[x], tokens_[y]};
      join(x, y, distance);
    }
  }

  int64_t nearest(int64_t x, int64_t before, double& distance) const {
    const double* row = distances_ + x * width_;
    distance = rows_.minimum(row, dead_, width_);
    if (before >= 0 && row[before] == distance) return before;
    return rows_.find(row, dead_, distance, width_);
  }

  // The union becomes cluster y.
  void join(int64_t x, int64_t y, double distance) {
    int32_t* position = std::lower_bound(live_, live_ + live_count_, static_cast<int32_t>(x));
    std::copy(position + 1, live_ + live_count_--, position);
    double* row = distances_ + y * width_;
    for (int64_t l = 0; l < live_count_; ++l) {
      __builtin_prefetch(distances_ + live_[l] * width_ + y, 1);  // column y, a line a row, is written below
    }
    rows_.join(distances_ + x * width_, row, sizes_, width_, sizes_[x], sizes_[y], distance);
    sizes_[y] += sizes_[x];
    sizes_[x] = 0;
    dead_[x] = kInfinity;
    row[y] = kInfinity;
    for (int64_t l = 0; l < live_count_; ++l) {
      const int64_t i = live_[l];
      distances_[i * width_ + y] = row[i];
    }
  }

  // Drops the rows and columns of dead clusters: half of the matrix is a quarter to read.
  void compact(int64_t chain_length) {
    int32_t* live_index = stack_;  // of a live cluster
    for (int64_t l = 0; l < live_count_; ++l) live_index[live_[l]] = static_cast<int32_t>(l);
    for (int64_t c = 0; c < chain_length; ++c) chain_[c] = live_index[chain_[c]];
    for (int64_t l = 0; l < live_count_; ++l) {
      const double* from = distances_ + live_[l] * width_;
      double* to = distances_ + l * live_count_;
      for (int64_t k = 0; k < live_count_; ++k) to[k] = from[live_[k]];
      sizes_[l] = sizes_[live_[l]];
      tokens_[l] = tokens_[live_[l]];
      dead_[l] = 0;
    }
    for (int64_t l = 0; l < live_count_; ++l) live_[l] = static_cast<int32_t>(l);
    width_ = live_count_;
  }

  const WardCut& call_;
  const int64_t* starts_;  // [documents] where each document's similarities begin
  std::atomic<bool>& finite_;
  const WardRows& rows_;
  int64_t n_ = 0;
  int64_t width_ = 0;  // rows and columns of distances_
  int64_t live_count_ = 0;
  double* distances_ = nullptr;  // [width, width]; infinity on the diagonal
  double* sizes_ = nullptr;      // [width] 0: dead
  double* dead_ = nullptr;       // [width] infinity, or 0
  Merge* merges_ = nullptr;
  int32_t* nodes_ = nullptr;
  int32_t* stack_ = nullptr;
  int32_t* tokens_ = nullptr;  // [width] the token that stands for a cluster
  int32_t* chain_ = nullptr;
  int32_t* live_ = nullptr;  // [live_count] rising
};

template <class Real>
void cut(const WardCut& call, const std::vector<int64_t>& starts, double work) {
  std::atomic<bool> finite{true};
  for_each_item(call.documents, threads_for(work),
                [&] { return WardClusterer<Real>(call, starts.data(), finite); });
  STD_TORCH_CHECK(finite, "late_interaction: similarities must not be NaN");
}

void ward_cut_(Tensor similarities, Tensor cu_seqlens, Tensor clusters, int64_t longest, Tensor labels,
               Tensor found) {
  const WardCut call = parse_ward_cut(similarities, cu_seqlens, clusters, longest, labels, found);
  check_offsets(call.offsets, call.documents, call.tokens, "cu_seqlens");
  std::vector<int64_t> starts(call.documents);
  int64_t cells = 0;
  for (int64_t i = 0; i < call.documents; ++i) {
    const int64_t n = call.offsets[i + 1] - call.offsets[i];
    STD_TORCH_CHECK(call.clusters[i] >= std::min<int64_t>(n, 1),
                    "late_interaction: clusters must be at least 1, got ", call.clusters[i]);
    STD_TORCH_CHECK(n <= longest, "late_interaction: longest must be at least ", n, ", got ", longest);
    starts[i] = cells;
    cells += n * n;
  }
  STD_TORCH_CHECK(call.cells == cells, "late_interaction: similarities must be [", cells,
                  "], the squares of the documents' lengths, got [", call.cells, "]");
  const double work = 8.0 * static_cast<double>(cells);
  call.dtype == Dtype::fp64 ? cut<double>(call, starts, work) : cut<float>(call, starts, work);
}

}  // namespace

}  // namespace late_interaction::cpu

LATE_INTERACTION_LIBRARY_IMPL(CPU, m) { m.impl("ward_cut_", TORCH_BOX(&late_interaction::cpu::ward_cut_)); }
