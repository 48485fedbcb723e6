// The CUDA side of the operators of a search: parse, launch. Nothing here waits for the device.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "../../common/arithmetic.h"
#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../runtime/op_helpers.h"
#include "kernels.h"

namespace late_interaction {

namespace {

constexpr int64_t kMostItems = int64_t{1} << 30;  // of a row, and blocks of a launch

bool has_contiguous_rows(const Tensor& x) { return x.dim() == 2 && (x.stride(1) == 1 || x.size(1) <= 1); }

ScoreColumns parse_columns(const Tensor& scores, const OptionalTensor& indices, int64_t first) {
  STD_TORCH_CHECK(scores.scalar_type() == ScalarType::Float && has_contiguous_rows(scores),
                  "late_interaction: scores must be float32 [rows, columns] with contiguous rows");
  STD_TORCH_CHECK(scores.size(1) <= kMostItems, "late_interaction: scores must have at most 2^30 columns");
  STD_TORCH_CHECK(
      !indices || (indices->scalar_type() == ScalarType::Long && has_contiguous_rows(*indices) &&
                   has_shape(*indices, {scores.size(0), scores.size(1)}) && same_place(*indices, scores)),
      "late_interaction: indices must be int64, shaped as scores, with contiguous rows");
  return {.scores = data_of<float>(scores),
          .score_stride = scores.stride(0),
          .indices = data_of<int64_t>(indices),
          .index_stride = indices ? indices->stride(0) : 0,
          .first = first};
}

FoundBefore parse_found(const Tensor& scores, const Tensor& indices) {
  STD_TORCH_CHECK(scores.scalar_type() == ScalarType::Float && scores.dim() == 2 && scores.is_contiguous() &&
                      indices.scalar_type() == ScalarType::Long && indices.is_contiguous() &&
                      has_shape(indices, {scores.size(0), scores.size(1)}) && same_place(indices, scores),
                  "late_interaction: found scores and indices must be contiguous float32 and int64 of one "
                  "shape [rows, found]");
  return {.scores = data_of<float>(scores), .indices = data_of<int64_t>(indices), .count = scores.size(1)};
}

// Launches on `like`'s device until a block can hold all items of a row, then for the best.
template <class From>
std::tuple<Tensor, Tensor> select_from(Selection call, const From& from, const FoundBefore& found,
                                       const Tensor& like) {
  const Tensor scores = new_tensor(like, {call.rows, call.k}, ScalarType::Float);
  const Tensor indices = new_tensor(like, {call.rows, call.k}, ScalarType::Long);
  if (call.rows == 0 || call.k == 0) return {scores, indices};
  const OnDevice on(like);
  const cudaStream_t stream = on.stream();
  const BestOutput best{mutable_data_of<float>(scores), mutable_data_of<int64_t>(indices)};
  if (call.items + found.count <= kSegmentItems) {
    check(launch_select(call, from, found, 0, nullptr, best, stream), "the best scores");
    return {scores, indices};
  }
  Keys keys{};
  OptionalTensor held;  // what the next launch reads
  do {
    const int64_t segments = segments_of(call.items);
    STD_TORCH_CHECK(call.rows <= kMostItems / segments, "late_interaction: too many rows");
    const int64_t room = std::min(2 * call.k, kMostBest);
    const Tensor next = new_tensor(like, {call.rows, segments * room}, ScalarType::Long);
    auto* data = mutable_data_of<int64_t>(next);
    check(held ? launch_select(call, keys, {}, room, data, {}, stream)
               : launch_select(call, from, {}, room, data, {}, stream),
          "the best scores of segments");
    held = next;
    call.items = segments * room;
    keys = {.data = data, .width = call.items, .list_stride = 0, .counts = nullptr, .lists = 1};
  } while (call.items + found.count > kSegmentItems);
  check(launch_select(call, keys, found, 0, nullptr, best, stream), "the best scores");
  return {scores, indices};
}

std::tuple<Tensor, Tensor> select_best(Tensor scores, OptionalTensor indices, int64_t first,
                                       OptionalTensor found_scores, OptionalTensor found_indices, int64_t k,
                                       bool largest) {
  const ScoreColumns from = parse_columns(scores, indices, first);
  STD_TORCH_CHECK(k >= 1, "late_interaction: k must be at least 1, got ", k);
  STD_TORCH_CHECK(found_scores.has_value() == found_indices.has_value(),
                  "late_interaction: found scores and indices must come together");
  FoundBefore found{};
  if (found_scores) {
    found = parse_found(*found_scores, *found_indices);
    STD_TORCH_CHECK(found_scores->size(0) == scores.size(0) && same_place(*found_scores, scores),
                    "late_interaction: found scores must have the rows and the device of scores");
    STD_TORCH_CHECK(found.count <= kMostBest, "late_interaction: at most ", kMostBest,
                    " scores can have been found before, got ", found.count);
  }
  const Selection call{.rows = scores.size(0),
                       .items = scores.size(1),
                       .k = std::min(k, scores.size(1) + found.count),
                       .largest = largest};
  STD_TORCH_CHECK(call.rows <= kMostItems, "late_interaction: too many rows");
  STD_TORCH_CHECK(call.k <= kMostBest, "late_interaction: k must be at most ", kMostBest, ", got ", k);
  return select_from(call, from, found, scores);
}

Tensor pack_found(Tensor scores, Tensor indices, int64_t width, int64_t size, std::vector<int64_t> notes,
                  bool largest) {
  PackArgs args{.found = parse_found(scores, indices),
                .rows = scores.size(0),
                .width = width,
                .size = size,
                .largest = largest,
                .notes = {},
                .packed = nullptr};
  STD_TORCH_CHECK(width >= args.found.count, "late_interaction: width must be at least ", args.found.count,
                  ", got ", width);
  const auto count = static_cast<int64_t>(notes.size());
  STD_TORCH_CHECK(count <= Notes::kMost, "late_interaction: at most ", Notes::kMost, " notes, got ", count);
  STD_TORCH_CHECK(width <= kMostItems && args.rows <= kMostItems && size >= args.rows * width + count,
                  "late_interaction: size must be at least that of keys and notes, got ", size);
  args.notes.count = static_cast<int>(count);
  std::copy(notes.begin(), notes.end(), args.notes.values);
  const OnDevice on(scores);
  const Tensor packed = new_tensor(scores, {size}, ScalarType::Long);
  args.packed = mutable_data_of<int64_t>(packed);
  if (size > 0) check(launch_pack_found(args, on.stream()), "what was found");
  return packed;
}

void add_checksum_(Tensor packed, int64_t place, Tensor x, int64_t factor) {
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Long && packed.dim() == 1 && packed.is_contiguous() &&
                      same_place(packed, x),
                  "late_interaction: packed must be a contiguous int64 [size] on the device of x");
  STD_TORCH_CHECK(place >= 0 && place < packed.size(0), "late_interaction: place must lie in packed, got ",
                  place);
  STD_TORCH_CHECK(x.is_contiguous(), "late_interaction: x must be contiguous");
  const int64_t bytes = x.numel() * x.element_size();
  if (bytes == 0) return;
  const OnDevice on(x);
  check(launch_add_checksum(x.const_data_ptr(), bytes, static_cast<uint64_t>(factor),
                            mutable_data_of<int64_t>(packed) + place, on.stream()),
        "the checksum");
}

std::tuple<Tensor, Tensor, Tensor> merge_found(Tensor packed, int64_t rows, int64_t width, int64_t notes,
                                               int64_t k, bool largest) {
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Long && packed.dim() == 2 && packed.is_contiguous(),
                  "late_interaction: packed must be a contiguous int64 [processes, size]");
  const int64_t processes = packed.size(0), size = packed.size(1);
  STD_TORCH_CHECK(processes >= 1 && processes <= kMostLists, "late_interaction: packed must be that of 1 to ",
                  kMostLists, " processes, got ", processes);
  STD_TORCH_CHECK(rows >= 0 && rows <= kMostItems && width >= 0 && width <= kMostItems / processes &&
                      notes >= 1 && notes <= Notes::kMost && size >= rows * width + notes,
                  "late_interaction: packed must hold ", width, " keys of each of ", rows, " rows, and ",
                  notes, " notes");
  const int64_t most = std::min(width * processes, kMostBest);
  STD_TORCH_CHECK(k >= 0 && k <= most, "late_interaction: k must be at most ", most, ", got ", k);
  const auto* data = data_of<int64_t>(packed);
  const auto* first_notes = data + size - notes;
  const Keys from{.data = data,
                  .width = std::max(width, int64_t{1}),
                  .list_stride = size,
                  .counts = first_notes,
                  .lists = processes};
  const Selection call{.rows = rows, .items = width * processes, .k = k, .largest = largest};
  auto [scores, indices] = select_from(call, from, {}, packed);
  const Tensor of_all = new_tensor(packed, {processes, notes}, ScalarType::Long);
  const OnDevice on(packed);
  const size_t bytes = notes * sizeof(int64_t);
  check(cudaMemcpy2DAsync(of_all.mutable_data_ptr(), bytes, first_notes, size * sizeof(int64_t), bytes,
                          processes, cudaMemcpyDeviceToDevice, on.stream()),
        "notes of the processes");
  return {scores, indices, of_all};
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("select_best", TORCH_BOX(&late_interaction::select_best));
  m.impl("pack_found", TORCH_BOX(&late_interaction::pack_found));
  m.impl("add_checksum_", TORCH_BOX(&late_interaction::add_checksum_));
  m.impl("merge_found", TORCH_BOX(&late_interaction::merge_found));
}
