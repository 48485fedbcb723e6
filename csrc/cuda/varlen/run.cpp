#include "run.h"

#include "../../plan/l2_parts.h"
#include "../runtime/device.h"
#include "../runtime/plan_override.h"
#include "../runtime/stream.h"

namespace late_interaction {

namespace {

// A document of mean length stands for all of them. If N divides the number of tokens, the documents are most
// likely of one length: of random lengths, N divides one sum in N.
ForwardPlan plan_packed(const ForwardCall& call, const Sizes& all, const Device& device) {
  const Inputs& in = call.in;
  Sizes sizes = in.sizes;
  sizes.Ld = mean_document(all);
  if (in.dtype == Dtype::fp64) sizes.Nq = in.packed->queries;
  ForwardTraits traits = traits_of(in, call.precision, call.token_scales.d.data != nullptr);
  traits.given_scales = traits.scaled;
  traits.ragged = sizes.Ld * all.N != all.Ld;
  return chosen_plan(sizes, traits, call.winners.has_value(), device);
}

// Where documents lie for the kernels that read token ranges, and how their blocks share them.
struct Shares {
  DocRangeBuffers doc_ranges;
  Tensor work_tile_ends;

  Shares(const Inputs& in, const ForwardPlan& plan, const Tensor& like)
      : doc_ranges(in, plan, like),
        work_tile_ends(new_tensor(like, {plan.work_tiles <= INT32_MAX ? plan.grid : 0}, ScalarType::Int)) {}

  void add_to(PackedIndex& index, const ForwardPlan& plan) const {
    index.doc_ranges = doc_ranges.data();
    if (work_tile_ends.numel() > 0) index.work_tile_ends = static_cast<int32_t*>(work_tile_ends.data_ptr());
    index.blocks = plan.grid;
    index.row_tiles = plan.row_tiles;
    index.document_tokens = plan.end_tokens;
    index.lpt = plan.lpt;
  }
};

// Slots of documents for a kernel that takes several to a tile, and how its blocks share them.
struct Slots {
  Tensor slots, work_tile_ends;
  ShortSlots list;

  Slots(const Inputs& in, const ForwardPlan& plan, const PackedIndex& index, const Tensor& like)
      : slots(new_tensor(like, {capacity(in, plan) + plan.docs + 1, 4}, ScalarType::Int)),
        work_tile_ends(new_tensor(like, {plan.grid + 1}, ScalarType::Int)),
        list{.spans = index.spans,
             .documents = index.documents,
             .span = plan.doc_columns,
             .docs = plan.docs,
             .slots = static_cast<DocRange*>(slots.data_ptr()),
             .capacity = capacity(in, plan),
             .work_tile_ends = static_cast<int32_t*>(work_tile_ends.data_ptr()),
             .blocks = plan.grid,
             .row_tiles = plan.row_tiles} {}

  static int64_t capacity(const Inputs& in, const ForwardPlan& plan) {
    return in.sizes.N + in.sizes.Ld / plan.doc_columns;
  }
};

void take_index(ForwardArgs& args, const PackedIndex& index) {
  args.packed = true;
  args.partials = 1;
  args.queries = static_cast<int32_t>(index.queries);
  args.q_offsets = index.q_offsets;
  args.row_queries = index.row_queries;
  args.spans = index.spans;
  args.work_tile_ends = index.work_tile_ends;
  args.doc_ranges = index.doc_ranges;
}

}  // namespace

PackedScores score_packed(const ForwardCall& call, const Sizes& all) {
  const Inputs& in = call.in;
  const int device = call.scores.get_device_index();
  const cudaStream_t stream = current_stream(device);
  PackedScores made;
  made.sums = call.scores;
  if (call.is_empty()) {
    fill_empty(call, stream);
    return made;
  }
  const ForwardPlan plan = plan_packed(call, all, device_properties(device));
  made.args = forward_args(call, plan);
  made.index.emplace(in, call.scores);
  PackedIndex index = made.index->index(in);
  std::optional<Shares> shares;
  if (plan.kernel->takes_shares) {
    shares.emplace(in, plan, call.scores);
    shares->add_to(index, plan);
  }
  check(launch_packed_index(index, stream), "index of packed sequences");
  take_index(made.args, index);
  std::optional<Slots> slots;
  if (plan.kernel->takes_slots) {
    slots.emplace(in, plan, index, call.scores);
    check(launch_short_slots(slots->list, stream), "slots of packed documents");
    made.args.doc_ranges = slots->list.slots;
    made.args.work_tile_ends = slots->list.work_tile_ends;
  }
  const bool fp64 = in.dtype == Dtype::fp64;
  // The fp64 kernel has a block for each query and document, so it skips tokens outside all queries.
  if (fp64 && call.winners) fill_sentinel(*call.winners, stream);
  if (!fp64 && in.sizes.Lq > plan.partial_rows) {
    // The host does not know how many partial sums the queries have; this is an upper bound.
    made.partial_rows = plan.partial_rows;
    const int64_t warps = ceil_div(in.sizes.Lq, plan.partial_rows);
    made.sums = new_tensor(call.scores, {warps + in.packed->queries, in.sizes.N}, ScalarType::Float);
    made.args.scores = made.sums.data_ptr();
    made.args.scores_stride = in.sizes.N;
  } else {
    made.args.scores = static_cast<float*>(call.scores.data_ptr()) + call.first_document;
  }
  check(ForwardInstance<>::launch({made.args, plan, stream}), "forward");
  return made;
}

void packed_scores_into(const ForwardCall& call) {
  const Inputs& in = call.in;
  const int index = call.scores.get_device_index();
  const int64_t documents = in.sizes.N;
  Sizes mean = in.sizes;
  mean.Ld = mean_document(mean);
  const int64_t at_once = documents_at_once(mean, in.dtype, device_properties(index));
  for (int64_t first = 0; first < std::max<int64_t>(documents, 1); first += std::max<int64_t>(at_once, 1)) {
    Inputs some = in;
    some.sizes.N = std::min(at_once, documents - first);
    some.packed->d_offsets += first;
    ForwardCall part = call.with(some);
    part.first_document = first;
    const PackedScores made = score_packed(part, in.sizes);
    if (made.partial_rows == 0) continue;
    check(launch_reduce_packed_partials(made.args, made.partial_rows,
                                        static_cast<float*>(call.scores.data_ptr()) + first, documents,
                                        current_stream(index)),
          "sum of partials");
  }
}

}  // namespace late_interaction
