// The planner by itself: no PyTorch, no CUDA, no GPU.
#include "../../csrc/plan/backward/gathered_grad_q.h"
#include "../../csrc/plan/backward/short_docs.h"
#include "../../csrc/plan/backward/tiled_grad_d.h"
#include "../../csrc/plan/forward/select.h"
#include "../../csrc/plan/l2_parts.h"
#include "../../csrc/plan/pairs.h"
#include "../../csrc/plan/plaid.h"
#include "../../csrc/plan/plan.h"
#include "../../csrc/plan/recompute.h"

#include <algorithm>
#include <array>
#include <string>

#include "check.h"

using namespace late_interaction;

namespace {

const Device kH200 = device_of_capability(90, 132);

std::string name(const ForwardPlan& plan) { return plan.kernel->name; }

// Bytes beside the gradients that the parts of a plan take, by its own account.
int64_t taken(const Sizes& s, const RecomputePlan& plan, int64_t sum_bytes) {
  const bool summed = plan.parts == RecomputePlan::Parts::documents;
  const int64_t pairs = plan.parts == RecomputePlan::Parts::apart
                            ? std::max(plan.queries * s.N, s.Nq * plan.documents)
                            : plan.queries * plan.documents;
  return 2 * pairs * s.Lq + (summed ? sum_bytes * s.Nq * s.Lq * s.d : 0);
}

void test_recomputed_winners_have_their_room() {
  using Parts = RecomputePlan::Parts;
  const RecomputeBytes half{.sum = 4}, single{};
  const Sizes small{Layout::in_batch, 256, 256, 32, 300, 128},
      large{Layout::in_batch, 512, 512, 32, 300, 128};
  const Sizes huge{Layout::in_batch, 4096, 4096, 32, 300, 128};
  const Sizes own{Layout::per_query, 4096, 64, 128, 300, 128};
  EXPECT(plan_recompute(small, half, true).parts == Parts::none);
  EXPECT(plan_recompute(large, half, true).parts == Parts::documents);
  EXPECT(plan_recompute(large, half, false).parts == Parts::apart);
  EXPECT(plan_recompute(huge, half, true).parts == Parts::apart);
  EXPECT(plan_recompute(huge, single, true).parts == Parts::documents);
  EXPECT(plan_recompute(own, half, true).parts == Parts::queries);
  EXPECT(plan_recompute({Layout::in_batch, 0, 9, 32, 300, 128}, half, true).parts == Parts::none);
  for (const Sizes& s : {small, large, huge, own}) {
    EXPECT(taken(s, plan_recompute(s, half, true), 4) <= 16 << 20);
    EXPECT(taken(s, plan_recompute(s, single, true), 0) <= 16 << 20);
  }
  // Scores of 4 MiB lie beside all that.
  const Sizes many{Layout::in_batch, 1024, 1024, 32, 80, 128};
  EXPECT(taken(many, plan_recompute(many, half, true), 4) + 4 * many.Nq * many.N <= 12 << 20);
  // A part is never less than a query or a document.
  const RecomputePlan one = plan_recompute({Layout::in_batch, 1 << 16, 3, 1024, 300, 128}, half, true);
  EXPECT(one.documents == 1 && one.queries >= 1);
}

void test_a_plan_fits_its_device() {
  for (int capability : {80, 86, 89, 90}) {
    const Device device = device_of_capability(capability, 100);
    for (int64_t Lq : {1, 32, 1030, INT32_MAX}) {
      for (int64_t d : {8, 128, 1024, 1 << 30}) {
        if (Lq * d > int64_t{1} << 40) continue;
        const Sizes sizes{Layout::in_batch, 64, 64, Lq, 300, d};
        const ForwardPlan forward = plan_forward(sizes, {}, device);
        EXPECT(forward.smem_bytes >= 0 && forward.smem_bytes <= device.smem_per_block);
        EXPECT(forward.grid >= 1 && forward.grid <= forward.work_tiles);
        const BackwardPlan backward =
            plan_backward(sizes, Dtype::bf16, true, false, Backward::lowmem, device);
        EXPECT(backward.chunk >= 0 && backward.lowmem_smem_bytes > 0);
        EXPECT(backward.lowmem_smem_bytes <= device.smem_per_block);
      }
    }
  }
}

void test_precision_decides_how_floats_multiply() {
  EXPECT(compute_for(Dtype::fp32, Precision::high) == Compute::tf32);
  EXPECT(compute_for(Dtype::fp32, Precision::medium) == Compute::bf16);
  EXPECT(compute_for(Dtype::bf16, Precision::highest) == Compute::bf16);
}

void test_automatic_is_resolved_and_the_rest_is_obeyed() {
  const Sizes sizes{Layout::in_batch, 256, 256, 32, 300, 128};
  EXPECT(plan_backward(sizes, Dtype::bf16, true, false, Backward::automatic, kH200).method !=
         Backward::automatic);
  EXPECT(plan_backward(sizes, Dtype::bf16, true, false, Backward::unified, kH200).method ==
         Backward::unified);
}

void test_a_plan_for_compressed_documents_covers_the_queries_and_fits() {
  for (int capability : {80, 86, 89, 90}) {
    const Device device = device_of_capability(capability, 100);
    for (Dtype dtype : {Dtype::bf16, Dtype::fp32, Dtype::fp64}) {
      for (int64_t Nq : {1, 5}) {
        for (int64_t Lq : {1, 32, 33, 1030}) {
          for (int64_t d : {1, 96, 128, 1024, 8192, 100000}) {
            const Sizes sizes{Layout::in_batch, Nq, 70, Lq, 300, d};
            for (bool winners : {false, true}) {
              const ResidualPlan plan =
                  plan_residual(sizes, false, dtype, Precision::highest, d % 32 == 0, winners, device);
              EXPECT(plan.grid >= 1 && plan.grid <= plan.work_tiles && plan.split_tokens == 0);
              if (plan.by_warp) {
                EXPECT(dtype == Dtype::fp64 || d > 1024);
                continue;
              }
              const int64_t rows = 8 * plan.column_blocks, tiles = plan.work_tiles / sizes.N;
              EXPECT(plan.smem_bytes <= device.smem_per_block);
              EXPECT(rows >= 8 && rows <= plan.columns);
              EXPECT(plan.any || plan.chunks % plan.step == 0);
              EXPECT(plan.partials * rows >= Lq && (plan.partials == 1 || rows < Lq));
              EXPECT(Lq > rows ? tiles == Nq * plan.partials : tiles * (rows / Lq) >= Nq);
            }
          }
        }
      }
    }
  }
}

void test_long_compressed_documents_are_cut_for_all_blocks() {
  const auto plan_of = [](int64_t Nq, int64_t N, int64_t Ld, bool packed) {
    const Sizes sizes{Layout::in_batch, Nq, N, 32, Ld, 128};
    return plan_residual(sizes, packed, Dtype::bf16, Precision::highest, true, false, kH200);
  };
  const ResidualPlan one = plan_of(1, 1, 3000000, true);
  EXPECT(one.grid == 4 * kH200.sm_count);
  EXPECT(one.most_split_docs >= 1 && one.most_splits * one.split_tokens >= 3000000);
  EXPECT(3000000 / one.split_tokens >= 2 * one.grid);
  // Whatever the lengths are, no document that stays whole is more than half of a block's share.
  const ResidualPlan packed = plan_of(1, 10000, 3000000, true);
  EXPECT(packed.split_tokens > 0 && 2 * packed.split_tokens * packed.grid <= 3000000 / 2 + 2 * packed.grid);
  // Padded ones that may not be long, or query rows enough, need no cuts.
  EXPECT(plan_of(1, 10000, 300, false).split_tokens == 0);
  EXPECT(plan_of(5000, 1, 1000, false).split_tokens == 0);
  EXPECT(plan_of(1, 1, 512, true).split_tokens == 0);
}

void test_listed_pairs_become_the_grid_where_that_is_sooner() {
  // 128 queries of 32 tokens, 128 documents of 300.
  const auto grid_of = [](int64_t pairs) { return PairSizes{pairs, 128, 128, 4096, 38400, 128, 32}; };
  EXPECT(score_as_grid(grid_of(128 * 128), Dtype::bf16));
  EXPECT(!score_as_grid(grid_of(128 * 12), Dtype::bf16));
  // One query reads as much either way, until documents are listed again.
  const auto rerank = [](int64_t pairs) { return PairSizes{pairs, 1, 10000, 32, 1000000, 128, 32}; };
  EXPECT(!score_as_grid(rerank(10000), Dtype::bf16));
  EXPECT(score_as_grid(rerank(20000), Dtype::bf16));
}

void test_a_plan_for_listed_pairs_has_a_unit_a_pair_and_fits() {
  for (int capability : {80, 89, 90}) {
    const Device device = device_of_capability(capability, 100);
    for (int64_t pairs : {1, 99, 10000}) {
      for (int64_t longest : {1, 32, 1030}) {
        const PairSizes sizes{pairs, 50, 200, 50 * longest, 60000, 128, longest};
        const ForwardPlan forward = plan_pairs(sizes, {.packed = true}, false, device);
        EXPECT(forward.smem_bytes <= device.smem_per_block);
        EXPECT(forward.work_tiles == pairs && forward.grid >= 1 && forward.grid <= pairs);
        EXPECT(name(forward) == (capability == 90 ? "sm90_d" : "sm80"));
        const BackwardPlan backward = plan_pairs_backward(sizes, longest, Dtype::bf16, true, device);
        EXPECT(backward.lowmem_smem_bytes <= device.smem_per_block);
        EXPECT(!backward.narrow_list || pairs * longest <= 65536);  // one document may meet them all
      }
    }
  }
}

void test_few_long_documents_are_cut_for_all_blocks() {
  const auto plan = [](Layout layout, int64_t Nq, int64_t N, int64_t Lq, int64_t Ld, ForwardTraits traits) {
    return plan_forward({layout, Nq, N, Lq, Ld, 128}, traits, kH200);
  };
  for (const Layout layout : {Layout::in_batch, Layout::per_query}) {
    for (const bool masked : {false, true}) {
      for (const auto& [Nq, N, Lq, Ld] : {std::array<int64_t, 4>{1, 1, 32, 1000000},
                                          {4, 4, 32, 100003},
                                          {1, 1, 1030, 1000000},
                                          {16, 4, 32, 65536},
                                          {1, 40, 128, 16384}}) {
        const ForwardPlan cut = plan(layout, Nq, N, Lq, Ld, {.masked = masked});
        EXPECT(cut.num_splits > 1 && cut.work_tiles == cut.row_tiles * N * cut.num_splits);
        EXPECT(!cut.compacted);
        EXPECT(cut.grid > 7 * kH200.sm_count / 10);
        EXPECT(ceil_div(Ld, cut.tokens) >= 2 * cut.num_splits);  // so that no piece is shorter than a tile
        EXPECT(cut.partials == (Lq + 127) / 128);
        EXPECT(explain({layout, Nq, N, Lq, Ld, 128}, cut).find("splits") != std::string::npos);
      }
      // Documents enough, short ones, lengths that no one knows, kernels that take documents whole.
      EXPECT(plan(layout, 1, 1000, 32, 1030, {.masked = masked}).num_splits == 1);
      EXPECT(plan(layout, 1, 1, 32, 300, {.masked = masked}).num_splits == 1);
      EXPECT(plan(layout, 1, 1, 32, 100000, {.masked = masked, .packed = true}).num_splits == 1);
      EXPECT(plan(layout, 1, 1, 32, 100000, {.dtype = Dtype::fp32, .masked = masked}).num_splits == 1);
    }
  }
}

void test_packed_documents_have_widths_for_their_lengths() {
  const Sizes many{Layout::in_batch, 1, 60000, 512, 128, 128};
  const ForwardPlan equal = plan_forward(many, {.packed = true}, kH200);
  EXPECT(name(equal) == "sm90_q" && equal.tokens == 128);  // one tile each
  const ForwardTraits traits{.packed = true, .ragged = true};
  const ForwardPlan ragged = plan_forward(many, traits, kH200);
  EXPECT(name(ragged) == "sm90_q" && ragged.tokens == 104);
  EXPECT(explain(many, ragged).find("tail ") != std::string::npos);
  for (const ForwardPlan& plan : forward_alternatives(many, traits, kH200)) {
    EXPECT(!plan.compacted && (name(plan) != "sm90_q" || !plan.masked));
  }
  // Codes are read where they lie, too: without scales as with scales of 1.
  for (const Dtype dtype : {Dtype::e4m3, Dtype::e5m2, Dtype::int8}) {
    for (const bool scaled : {false, true}) {
      const ForwardTraits codes{.dtype = dtype, .packed = true, .ragged = true, .scaled = scaled};
      for (const int64_t Ld : {40, 128, 1030}) {
        const Sizes s{Layout::in_batch, 1, 60000, 512, Ld, 128};
        const ForwardPlan plan = plan_forward(s, codes, kH200);
        EXPECT(name(plan) == "sm90_q" && plan.tails && plan.scaled && !plan.masked && !plan.compacted);
        EXPECT(Ld != 128 || plan.tokens == (dtype == Dtype::int8 ? 112 : 104));
        EXPECT(Ld < 1030 || plan.tokens >= 104);
        EXPECT(explain(s, plan).find("tail ") != std::string::npos);
      }
      for (const ForwardPlan& plan : forward_alternatives(many, codes, kH200)) EXPECT(!plan.compacted);
    }
    // The widest tile of packed codes leaves four stages, also of rows of two k chunks.
    const Sizes longest{Layout::in_batch, 1, 60000, 512, 1030, 256};
    for (const ForwardPlan& plan :
         forward_alternatives(longest, {.dtype = dtype, .packed = true, .scaled = true}, kH200)) {
      EXPECT(name(plan) != "sm90_q" || plan.stages >= 4);
    }
  }
  // 16-bit tokens with scales have no tails.
  const ForwardPlan plan = plan_forward(many, {.packed = true, .scaled = true}, kH200);
  EXPECT(name(plan) == "sm90_q" && plan.masked && !plan.tails);
}

void test_no_warpgroup_idles_beside_winners() {
  const ForwardTraits traits{};
  const auto left = [&](int64_t rows, int64_t documents, int64_t Ld, bool winners, bool listed) {
    const Sizes s{Layout::in_batch, 1, documents, rows, Ld, 128};
    return adapted(plan_forward(s, traits, kH200), s, traits, kH200, winners, listed);
  };
  for (const bool winners : {false, true}) {
    for (const bool listed : {false, true}) {
      const bool fewer = winners || listed;
      const ForwardPlan many = left(64, 1000, 300, winners, listed);
      const ForwardPlan long_ones = left(64, 200, 4096, winners, listed);
      EXPECT(many.teams == (fewer ? 3 : 4) && many.members == 1);
      // Two documents a block: two teams of two, or one after the other by all three.
      EXPECT(long_ones.teams == (fewer ? 1 : 2) && long_ones.members == (fewer ? 3 : 2));
      EXPECT(many.stages % many.teams == 0 && many.smem_bytes <= kH200.smem_per_block);
      EXPECT(left(32, 1000, 300, winners, listed).teams == 4);
      EXPECT(left(128, 1000, 300, winners, listed).teams == (winners ? 2 : 3));
    }
  }
  // One document a block: its tiles in turn, to as many as there are.
  EXPECT(left(128, 100, 1024, true, false).members == 2 && left(128, 100, 1024, false, true).members == 3);
  for (const Layout layout : {Layout::in_batch, Layout::per_query}) {
    for (const int64_t rows : {1, 33, 64, 65, 100, 128}) {
      for (const int64_t documents : {1, 50, 200, 3000}) {
        for (const int64_t Ld : {17, 129, 5000}) {
          for (const int64_t d : {8, 128, 256, 768, 1024}) {
            const Sizes s{layout, 1, documents, rows, Ld, d};
            const ForwardPlan alone = plan_forward(s, traits, kH200);
            const ForwardPlan plan = adapted(alone, s, traits, kH200, true, rows % 2 == 0);
            if (name(plan) != "sm90_d") continue;
            const int most = plan.rows == 32 ? 4 : plan.rows == 128 ? 2 : 3;
            EXPECT(plan.teams >= 1 && plan.members >= 1 && plan.teams * plan.members <= most);
            EXPECT(plan.stages >= 4 && plan.stages % (plan.teams * plan.members) == 0);
            EXPECT(plan.smem_bytes <= kH200.smem_per_block && plan.grid == alone.grid);
          }
        }
      }
    }
  }
  EXPECT(name(left(256, 1000, 300, true, false)) == "sm90_q");
}

// Packed queries and documents of mean lengths.
Sizes packed(int64_t queries, int64_t documents, int64_t Lq, int64_t Ld, int64_t d) {
  return {Layout::in_batch, 1, documents, queries * Lq, Ld, d};
}

void check_packed_parts(const Sizes& s, Dtype dtype, const Device& device) {
  const PackedParts parts = packed_backward_parts(s, dtype, device);
  const int64_t row = s.d * element_bytes(dtype), sum = dtype == Dtype::fp32 ? 0 : 4 * s.d;
  const bool by_documents = parts.documents < s.N, by_rows = parts.rows < s.Lq;
  EXPECT(parts.documents >= 1 && parts.documents <= s.N && parts.rows >= 1 && parts.rows <= s.Lq);
  if (by_documents) EXPECT(parts.documents * s.Ld * row <= device.l2_bytes / 4);
  if (by_rows) EXPECT(parts.rows % 64 == 0 && (parts.rows - 64) * row <= device.l2_bytes / 8);
  const int64_t taken = (by_documents ? sum * s.Lq : 0) + (by_rows ? (sum * s.Ld + 4 * parts.rows) * s.N : 0);
  EXPECT(taken <= 2 * s.N * s.Lq);  // half of what winners of 4 bytes take
  if (s.N >= 16384 && s.d <= 128) EXPECT(by_documents && by_rows);
}

void test_packed_gradients_have_parts_that_fit() {
  for (const Device& device : {kH200, device_of_capability(86, 84)}) {
    for (Dtype dtype : {Dtype::bf16, Dtype::fp16, Dtype::fp32}) {
      for (int64_t B : {2048, 8192, 16384, 65536}) {
        for (int64_t d : {64, 128, 768}) check_packed_parts(packed(B, B + 7, 32, 180, d), dtype, device);
      }
    }
  }
}

void test_parts_of_recomputed_winners_fill_the_device() {
  for (int64_t B : {4096, 8192, 16384, 65536}) {
    const Sizes all{Layout::in_batch, B, B, 32, 180, 128};
    const BatchPart part = recompute_part(all, Dtype::bf16, kH200);
    const int64_t last = B - (ceil_div(B, part.documents) - 1) * part.documents;
    if (B <= 16384) EXPECT(last > part.documents / 2);  // of about the same size
    const Sizes s{Layout::in_batch, part.queries, part.documents, 32, 180, 128};
    EXPECT(plan_tiled_grad_d(s, Dtype::bf16, true, kH200).has_value());
    EXPECT(2 * part.queries * part.documents * 32 <= 64 << 20);  // winners
  }
}

void check_gathered(const Sizes& s, const GatheredGradQPlan& plan, const Device& device) {
  const int docs = gathered_docs(plan.tma);
  EXPECT(plan.tma == device.wgmma && plan.pdl == (device.capability >= 90));
  const int64_t rows = int64_t{plan.octets} * kGatheredOctetRows;
  EXPECT(plan.octets >= 1 && plan.octets <= kGatheredWarps * kGatheredMostOctets);
  EXPECT(plan.slices * kGatheredDims >= s.d && (plan.slices - 1) * kGatheredDims < s.d);
  EXPECT(plan.grid % plan.slices == 0 && plan.grid / plan.slices * rows >= s.Nq * s.Lq);
  EXPECT((plan.grid / plan.slices - 1) * rows < s.Nq * s.Lq);
  EXPECT(plan.stages >= 2 && plan.stages <= kGatheredMostStages);
  const int side = plan.octets * gathered_side_bytes(docs);
  EXPECT(plan.stages * (gathered_tile_bytes(s.Ld, docs) + side) <= plan.smem_bytes);
  EXPECT(rows * (kGatheredDims + kGatheredSumPadding) * 4 <= plan.smem_bytes);
  EXPECT(plan.smem_bytes + 1024 <= device.smem_per_block);
}

void check_tiled(const Sizes& s, const TiledGradDPlan& plan, const Device& device) {
  const GradDShape& shape = plan.shape;
  EXPECT(shape.tma == device.wgmma && plan.pdl == (device.capability >= 90));
  EXPECT(shape.docs * shape.consumers() + shape.docs * shape.producers() <= 16);
  EXPECT(shape.rows % 32 == 0 && s.Ld <= shape.most_tokens() && plan.grid * shape.docs >= s.N);
  EXPECT(shape.list_bytes() + 2 * s.d * shape.rows * kGradDStages == plan.smem_bytes);
  EXPECT(plan.smem_bytes <= device.smem_per_block);
}

void test_gathered_and_tiled_gradients_fit_and_cover_all_rows(const Device& device) {
  int found = 0, tiled = 0;
  for (int64_t Nq : {1, 7, 64, 500, 4096, 100000}) {
    for (int64_t N : {32, 33, 264, 5000}) {
      for (int64_t Lq : {8, 32, 136, 1032}) {
        for (int64_t Ld : {1, 65, 180, 203, 255}) {
          for (int64_t d : {8, 96, 128, 1024}) {
            const Sizes s{Layout::in_batch, Nq, N, Lq, Ld, d};
            const auto plan = plan_gathered_grad_q(s, Dtype::bf16, true, device);
            if (plan) check_gathered(s, *plan, device), ++found;
            const auto grad_d = plan_tiled_grad_d(s, Dtype::bf16, true, device);
            if (grad_d) check_tiled(s, *grad_d, device), ++tiled;
          }
        }
      }
    }
  }
  EXPECT(found > 200 && tiled > 300);
}

// Code for 7.5 has only a trap in place of these kernels.
void test_gpus_before_8_0_take_no_kernel_of_products_of_gradients() {
  const Device turing = device_of_capability(75, 40), ampere = device_of_capability(80, 108);
  int found = 0;
  const auto is_for_ampere_alone = [&](const auto& plan) {
    EXPECT(!plan(turing));
    if (plan(ampere)) ++found;
  };
  for (int64_t Ld : {17, 33, 180}) {
    const Sizes s{Layout::in_batch, 1024, 1024, 32, Ld, 128}, lone{Layout::per_query, 1, 20000, 32, Ld, 128};
    for (bool grad_q : {false, true}) {
      is_for_ampere_alone([&](const Device& on) { return plan_incidence(s, Dtype::bf16, true, grad_q, on); });
    }
    is_for_ampere_alone([&](const Device& on) { return plan_lone_query(lone, Dtype::bf16, true, on); });
    is_for_ampere_alone([&](const Device& on) { return plan_gathered_grad_q(s, Dtype::bf16, true, on); });
  }
  EXPECT(found >= 6);
}

// Code for 7.5 has only a trap for three products of TF32.
void test_gpus_before_8_0_multiply_float32_by_ffma() {
  const ForwardTraits full_accuracy{.dtype = Dtype::fp32};
  for (const int capability : {75, 80}) {
    int of_tf32 = 0, of_ffma = 0;
    for (int64_t Lq : {8, 32, 300}) {
      for (int64_t d : {64, 128, 768}) {
        const Sizes s{Layout::in_batch, 64, 1000, Lq, 180, d};
        for (const ForwardPlan& plan :
             forward_alternatives(s, full_accuracy, device_of_capability(capability, 72))) {
          if (plan.compute == Compute::tf32x3) ++of_tf32;
          if (plan.compute == Compute::fp32) ++of_ffma;
        }
      }
    }
    EXPECT(of_ffma > 0 && (of_tf32 > 0) == (capability == 80));
  }
}

void test_gathered_gradients_in_whole_waves() {
  // A wave less than whole is worth larger blocks, but not a wave more.
  const auto plan =
      plan_gathered_grad_q({Layout::in_batch, 4096, 256, 32, 180, 128}, Dtype::bf16, true, kH200);
  EXPECT(plan && plan->grid == 4 * kH200.sm_count);
}

void test_packed_gradients_without_parts() {
  const auto is_whole = [](const Sizes& s, Dtype dtype) {
    const PackedParts parts = packed_backward_parts(s, dtype, kH200);
    return parts.documents == s.N && parts.rows == s.Lq && explain(s, parts).empty();
  };
  EXPECT(is_whole(packed(256, 256, 32, 180, 128), Dtype::bf16));    // it is over soon
  EXPECT(is_whole(packed(2048, 2048, 32, 180, 128), Dtype::bf16));  // its parts take more than half of it
  EXPECT(is_whole(packed(16384, 16384, 32, 180, 128), Dtype::fp64));
  EXPECT(is_whole(packed(1, 1000000, 128, 180, 128), Dtype::bf16));  // few rows of Q
  EXPECT(is_whole(packed(1 << 25, 2, 32, 40000, 8), Dtype::bf16));   // a pitch that no copy has
  EXPECT(!is_whole(packed(1 << 22, 32, 32, 40000, 8), Dtype::bf16));
}

void test_packed_parts_can_be_read() {
  const Sizes s = packed(16384, 16384, 32, 180, 128);
  const std::string said = explain(s, packed_backward_parts(s, Dtype::bf16, kH200));
  EXPECT(said.find("grad_Q by ") != std::string::npos && said.find("grad_D by ") != std::string::npos);
}

void test_a_plan_can_be_read() {
  const Sizes sizes{Layout::in_batch, 32, 32, 32, 300, 128};
  const ForwardPlan plan = plan_forward(sizes, {}, kH200);
  EXPECT(explain(sizes, plan).find("forward") != std::string::npos);
}

}  // namespace

int main() {
  test_recomputed_winners_have_their_room();
  test_a_plan_fits_its_device();
  test_precision_decides_how_floats_multiply();
  test_automatic_is_resolved_and_the_rest_is_obeyed();
  test_a_plan_for_compressed_documents_covers_the_queries_and_fits();
  test_long_compressed_documents_are_cut_for_all_blocks();
  test_listed_pairs_become_the_grid_where_that_is_sooner();
  test_a_plan_for_listed_pairs_has_a_unit_a_pair_and_fits();
  test_few_long_documents_are_cut_for_all_blocks();
  test_packed_documents_have_widths_for_their_lengths();
  test_no_warpgroup_idles_beside_winners();
  test_packed_gradients_have_parts_that_fit();
  test_parts_of_recomputed_winners_fill_the_device();
  for (int capability : {80, 86, 89, 90, 100, 120}) {
    test_gathered_and_tiled_gradients_fit_and_cover_all_rows(device_of_capability(capability, 132));
  }
  test_gpus_before_8_0_take_no_kernel_of_products_of_gradients();
  test_gpus_before_8_0_multiply_float32_by_ffma();
  test_gathered_gradients_in_whole_waves();
  test_packed_gradients_without_parts();
  test_packed_parts_can_be_read();
  test_a_plan_can_be_read();
  return failures != 0;
}
