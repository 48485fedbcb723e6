#include "forward/kernel.h"
#include "kernel_limits.h"
#include "plaid.h"
#include "plan.h"
#include "text.h"

namespace late_interaction {

std::string name_of(Backward method) {
  return method == Backward::lowmem ? "lowmem" : method == Backward::unified ? "unified" : "auto";
}

namespace {

std::string how_summed(const ForwardPlan& plan) {
  const std::string partials = joined("up to ", plan.partials, " partial sums a query, added by ");
  if (plan.num_splits > 1) {
    return "in a second kernel, which combines the splits of each document" +
           (plan.partials == 1 ? "" : "; " + partials + "a third");
  }
  return plan.partials == 1 ? "a query's rows meet in one warp" : partials + "a second kernel";
}

// A line for each thing that is done to the columns of a tile.
std::string describe_columns(const Sizes& s, const ForwardPlan& plan) {
  std::string lines;
  if (plan.masked) {
    lines += joined("masked     columns are left out one by one",
                    plan.trimmed ? ", of what a kernel before finds between the first and the last kept" : "",
                    "\n");
  }
  if (plan.compacted) {
    lines +=
        "compacted  by a kernel before: the kept tokens of documents with holes, or shorter than a tile\n";
  }
  if (plan.num_splits > 1) {
    lines += joined("splits     each document over ", plan.num_splits, " blocks, some ",
                    ceil_div(s.Ld, plan.num_splits),
                    " tokens each: whole ones would leave multiprocessors idle\n");
  }
  if (plan.tails) {
    lines += joined("tail       the last tile of a document is ", tail_width(plan.tokens),
                    " tokens wide where what remains fits it\n");
  }
  if (plan.lpt) {
    lines += "schedule   documents go to the blocks of a row tile by length, longest first\n";
  }
  if (plan.scaled) lines += "scaled     columns have scales of their own\n";
  return lines;
}

}  // namespace

std::string explain(const Sizes& s, const ForwardPlan& plan) {
  const ForwardText text = plan.kernel->text(s, plan);
  const std::string reason = "why        " + text.why + "\n";
  if (plan.compute == Compute::fp64) {
    return joined("kernel     maxsim_forward_", plan.kernel->name,
                  "\ntile       none: a block for each query and document\ngrid       ", plan.grid,
                  " blocks\n", reason);
  }
  if (plan.grid == 0) {  // no kernel takes the call
    return "kernel     maxsim_forward of maxsim_dequantized, products in tf32: float32 copies of the codes, "
           "some documents at a time\n" +
           reason;
  }
  const char* unit = plan.docs > 1         ? "group of documents"
                     : plan.num_splits > 1 ? "split of a document"
                                           : "document";
  return joined("kernel     maxsim_forward_", plan.kernel->name, ", products in ",
                plan.kernel->two_terms ? "3x" : "", name_of(plan.compute), "\ntile       ", text.tile, ": ",
                plan.rows, " query rows x ", plan.tokens, " document tokens\nrows       ",
                s.layout == Layout::in_batch ? "of all queries together, " : "of each query alone, ",
                counted(plan.row_tiles, "tile"), "\nring       ", text.ring, "\n", text.more, "Q          ",
                text.q, "\nmemory     ", plan.smem_bytes, " bytes of shared memory a block, ",
                plan.blocks_per_sm, " blocks a multiprocessor\n", describe_columns(s, plan), "grid       ",
                plan.grid, " blocks share ", plan.work_tiles, " (row tile, ", unit,
                ") work tiles\nsum        ", how_summed(plan), "\n", reason);
}

namespace {

// The rates that the choice of a kernel looked at.
std::string looked_at(const ForwardPlan& plan, const Rates& rates) {
  const auto in = [](const std::string& type, int rate) {
    return joined(rate, " operations a clock and multiprocessor in ", type);
  };
  if (plan.kernel->two_terms || plan.compute == Compute::tf32x3 || plan.compute == Compute::fp32) {
    return joined(in("fp16", rates.fp16), ", ", rates.tf32, " in tf32, ", rates.ffma, " by FFMA");
  }
  const int64_t bytes = element_bytes(plan.compute);
  if (plan.grid == 0 || bytes == 4) return in("tf32", rates.tf32);
  if (plan.compute == Compute::int8) return in("int8", rates.int8);
  if (bytes == 2) return in(name_of(plan.compute), rates.fp16);
  return rates.fp8 > 0 ? in("fp8", rates.fp8) : in("fp16, to which fp8 is widened", rates.fp16);
}

}  // namespace

std::string explain_rates(const ForwardPlan& plan, const Device& device) {
  if (plan.compute == Compute::fp64) return "";
  return joined("rates      ", looked_at(plan, rates_of(device)), " (compute capability ",
                device.capability / 10, ".", device.capability % 10, device.geforce ? ", GeForce)\n" : ")\n");
}

std::string explain(const Sizes& s, const BackwardPlan& plan) {
  std::string lines =
      joined("method     ", name_of(plan.method), "\ngather     ", plan.gather_grid, " blocks of 8 warps, ",
             plan.split, " to a query token",
             plan.method == Backward::unified ? "; grad_D by fp32 vector reductions\n" : "\n");
  if (plan.method == Backward::lowmem) {
    const std::string ordering = plan.single_query ? "none, each token looks for its few winners"
                                                   : joined(counted(plan.segments, "warp"), ", up to ",
                                                            plan.list_capacity, " winners at a time");
    lines += joined("grad_D     ", plan.grad_d_grid, " blocks of 8 warps, each ", plan.tile_tokens, " of ",
                    s.Ld, " tokens of a document\nordering   ", ordering, ", ", plan.lowmem_smem_bytes,
                    " bytes of shared memory a block\n");
  }
  if (plan.finish_later) lines += "normalize  by a second kernel: a row is longer than a warp's registers\n";
  return lines;
}

std::string explain(const std::optional<TiledGradQPlan>& plan) {
  if (!plan) return "";
  return joined("grad_Q     by ", plan->grid, " blocks instead, ", kTiledRows, " query rows and ", kSliceDims,
                " dims each: documents pass through shared memory\n");
}

std::string explain(const Sizes& s, const ResidualPlan& plan, int nbits) {
  if (plan.by_warp) {
    return joined(
        "kernel     maxsim_residual_by_warp, products in ", name_of(plan.compute),
        "\ntile       none: a warp for each query token, which decompresses the document's tokens in order"
        "\ngrid       ",
        plan.grid, " blocks share ", plan.work_tiles, " (query, document) work tiles\nwhy        ",
        plan.compute == Compute::fp64 ? "float64 products, which no tile of the tensor cores serves"
                                      : "embeddings so long that no query rows fit in shared memory",
        "\n");
  }
  const bool bytes = element_bytes(plan.compute) == 2;
  const int64_t rows = s.Nq * s.Lq;
  return joined(
      "kernel     maxsim_residual_tile, products in ", name_of(plan.compute),
      "\ntile       64 document tokens x ", 8 * plan.column_blocks,
      " query rows; a token is decompressed in the registers that multiply it, ", 64 * plan.step,
      " bytes at a time\nrows       of all queries together, ", counted(plan.row_tiles, "tile"),
      plan.row_tiles == 1 ? "" : ", each of which decompresses the documents again", "\nlookup     ",
      bytes ? joined("a byte of ", nbits, "-bit buckets at a time") : "bucket by bucket",
      ", from shared memory\n",
      plan.split_tokens == 0 ? ""
                             : joined("splits     documents of more than ", 2 * plan.split_tokens,
                                      " tokens, into splits of ", plan.split_tokens, "\n"),
      "memory     ", plan.smem_bytes, " bytes of shared memory a block\ngrid       ", plan.grid,
      " blocks share ", plan.work_tiles, " (tile of query rows, document) work tiles\nsum        ",
      plan.partials == 1 ? "a query's rows meet in one warp"
                         : joined(plan.partials, " partial sums a query, added by a second kernel"),
      "\nwhy        ", rows, rows == 1 ? " query row meets" : " query rows meet", " each document",
      plan.any ? "; winners, rows or a precision that the specialized tiles do not take" : "", "\n");
}

}  // namespace late_interaction
