#include <iterator>
#include <sstream>

#include "forward/kernel.h"
#include "kernel_limits.h"
#include "plaid.h"
#include "plan.h"

namespace late_interaction {

namespace {

// By enumerator, in the order of plan.h.
constexpr const char* kComputeNames[] = {"bf16", "fp16", "tf32", "3xtf32", "fp64",
                                         "e4m3", "e5m2", "int8", "fp32"};
static_assert(std::size(kComputeNames) == kComputes);

}  // namespace

std::string name_of(Compute compute) { return kComputeNames[static_cast<int>(compute)]; }

std::string name_of(Backward method) {
  return method == Backward::lowmem ? "lowmem" : method == Backward::unified ? "unified" : "auto";
}

namespace {

std::string how_summed(const ForwardPlan& plan) {
  const std::string partials = "up to " + std::to_string(plan.partials) + " partial sums a query, added by ";
  if (plan.num_splits > 1) {
    return "in a second kernel, which combines the splits of each document" +
           (plan.partials == 1 ? std::string() : "; " + partials + "a third");
  }
  return plan.partials == 1 ? "a query's rows meet in one warp" : partials + "a second kernel";
}

// A line for each thing that is done to the columns of a tile.
std::string describe_columns(const Sizes& s, const ForwardPlan& plan) {
  std::string lines;
  if (plan.masked) {
    lines += std::string("masked     columns are left out one by one") +
             (plan.trimmed ? ", of what a kernel before finds between the first and the last kept\n" : "\n");
  }
  if (plan.compacted) {
    lines +=
        "compacted  by a kernel before: the kept tokens of documents with holes, or shorter than a tile\n";
  }
  if (plan.num_splits > 1) {
    lines += "splits     each document over " + std::to_string(plan.num_splits) + " blocks, some " +
             std::to_string(ceil_div(s.Ld, plan.num_splits)) +
             " tokens each: whole ones would leave multiprocessors idle\n";
  }
  if (plan.compacted && has_tails(element_bytes(plan.compute), plan.masked, plan.scaled)) {
    lines += "tail       the last tile of a document is " + std::to_string(tail_width(plan.tokens)) +
             " tokens wide where what remains fits it\n";
  }
  if (plan.lpt) {
    lines += "schedule   documents go to the blocks of a row tile by length, longest first\n";
  }
  if (plan.scaled) lines += "scaled     columns have scales of their own\n";
  return lines;
}

}  // namespace

std::string explain(const Sizes& s, const ForwardPlan& plan) {
  std::ostringstream out;
  const ForwardText text = plan.kernel->text(s, plan);
  const std::string name = plan.kernel->name, reason = "why        " + text.why + "\n";
  if (plan.compute == Compute::fp64) {
    return "kernel     maxsim_forward_" + name +
           "\ntile       none: a block for each query and document\ngrid       " + std::to_string(plan.grid) +
           " blocks\n" + reason;
  }
  if (plan.grid == 0) {  // no kernel takes the call
    return "kernel     maxsim_forward of maxsim_dequantized, products in tf32: float32 copies of the codes, "
           "some documents at a time\n" +
           reason;
  }
  const std::string unit = plan.docs > 1         ? "group of documents"
                           : plan.num_splits > 1 ? "split of a document"
                                                 : "document";
  out << "kernel     maxsim_forward_" << name << ", products in " << (plan.kernel->two_terms ? "3x" : "")
      << name_of(plan.compute) << "\n"
      << "tile       " << text.tile << ": " << plan.rows << " query rows x " << plan.tokens
      << " document tokens\n"
      << "rows       "
      << (s.layout == Layout::in_batch ? "of all queries together, " : "of each query alone, ")
      << plan.row_tiles << (plan.row_tiles == 1 ? " tile\n" : " tiles\n") << "ring       " << text.ring
      << "\n"
      << text.more << "Q          " << text.q << "\n"
      << "memory     " << plan.smem_bytes << " bytes of shared memory a block, " << plan.blocks_per_sm
      << " blocks a multiprocessor\n"
      << describe_columns(s, plan) << "grid       " << plan.grid << " blocks share " << plan.work_tiles
      << " (row tile, " << unit << ") work tiles\n"
      << "sum        " << how_summed(plan) << "\n"
      << reason;
  return out.str();
}

namespace {

// The rates that the choice of a kernel looked at.
std::string looked_at(const ForwardPlan& plan, const Rates& rates) {
  const auto in = [](const std::string& type, int rate) {
    return std::to_string(rate) + " operations a clock and multiprocessor in " + type;
  };
  if (plan.kernel->two_terms || plan.compute == Compute::tf32x3 || plan.compute == Compute::fp32) {
    return in("fp16", rates.fp16) + ", " + std::to_string(rates.tf32) + " in tf32, " +
           std::to_string(rates.ffma) + " by FFMA";
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
  return "rates      " + looked_at(plan, rates_of(device)) + " (compute capability " +
         std::to_string(device.capability / 10) + "." + std::to_string(device.capability % 10) +
         (device.geforce ? ", GeForce)\n" : ")\n");
}

std::string explain(const Sizes& s, const BackwardPlan& plan) {
  std::ostringstream out;
  out << "method     " << name_of(plan.method) << "\n"
      << "gather     " << plan.gather_grid << " blocks of 8 warps, " << plan.split << " to a query token"
      << (plan.method == Backward::unified ? "; grad_D by fp32 vector reductions\n" : "\n");
  if (plan.method == Backward::lowmem) {
    out << "grad_D     " << plan.grad_d_grid << " blocks of 8 warps, each " << plan.tile_tokens << " of "
        << s.Ld << " tokens of a document\n"
        << "ordering   ";
    if (plan.single_query) {
      out << "none, each token looks for its few winners";
    } else {
      out << plan.segments << (plan.segments == 1 ? " warp" : " warps") << ", up to " << plan.list_capacity
          << " winners at a time";
    }
    out << ", " << plan.lowmem_smem_bytes << " bytes of shared memory a block\n";
  }
  if (plan.finish_later) out << "normalize  by a second kernel: a row is longer than a warp's registers\n";
  return out.str();
}

std::string explain(const std::optional<TiledGradQPlan>& plan) {
  if (!plan) return "";
  return "grad_Q     by " + std::to_string(plan->grid) + " blocks instead, " + std::to_string(kTiledRows) +
         " query rows and " + std::to_string(kSliceDims) +
         " dims each: documents pass through shared memory\n";
}

std::string explain(const Sizes& s, const ResidualPlan& plan, int nbits) {
  std::ostringstream out;
  const int64_t rows = s.Nq * s.Lq;
  if (plan.by_warp) {
    out << "kernel     maxsim_residual_by_warp, products in " << name_of(plan.compute) << "\n"
        << "tile       none: a warp for each query token, which decompresses the document's tokens in order\n"
        << "grid       " << plan.grid << " blocks share " << plan.work_tiles
        << " (query, document) work tiles\n"
        << "why        "
        << (plan.compute == Compute::fp64 ? "float64 products, which no tile of the tensor cores serves"
                                          : "embeddings so long that no query rows fit in shared memory")
        << "\n";
  } else {
    const bool bytes = plan.compute == Compute::bf16 || plan.compute == Compute::fp16;
    out << "kernel     maxsim_residual_tile, products in " << name_of(plan.compute) << "\n"
        << "tile       64 document tokens x " << 8 * plan.column_blocks
        << " query rows; a token is decompressed in the registers that multiply it, " << 64 * plan.step
        << " bytes at a time\n"
        << "rows       of all queries together, " << plan.row_tiles
        << (plan.row_tiles == 1 ? " tile" : " tiles, each of which decompresses the documents again") << "\n"
        << "lookup     "
        << (bytes ? "a byte of " + std::to_string(nbits) + "-bit buckets at a time" : "bucket by bucket")
        << ", from shared memory\n";
    if (plan.split_tokens > 0) {
      out << "splits     documents of more than " << 2 * plan.split_tokens << " tokens, into splits of "
          << plan.split_tokens << "\n";
    }
    out << "memory     " << plan.smem_bytes << " bytes of shared memory a block\n"
        << "grid       " << plan.grid << " blocks share " << plan.work_tiles
        << " (tile of query rows, document) work tiles\n"
        << "sum        "
        << (plan.partials == 1
                ? std::string("a query's rows meet in one warp")
                : std::to_string(plan.partials) + " partial sums a query, added by a second kernel")
        << "\n"
        << "why        " << rows << (rows == 1 ? " query row meets" : " query rows meet") << " each document"
        << (plan.any ? "; winners, rows or a precision that the specialized tiles do not take" : "") << "\n";
  }
  return out.str();
}

}  // namespace late_interaction
