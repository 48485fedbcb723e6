#include <iterator>
#include <sstream>

#include "forward_candidates.h"
#include "kernel_limits.h"
#include "plaid.h"
#include "plan.h"
#include "rates.h"

namespace late_interaction {

namespace {

// By enumerator, in the order of plan.h.
constexpr const char* kComputeNames[] = {"bf16", "fp16", "tf32", "3xtf32", "fp64",
                                         "e4m3", "e5m2", "int8", "fp32"};
constexpr const char* kTileNames[] = {"wide", "thin"};
constexpr const char* kKernelNames[] = {
    "sm90_q",          "sm90_q_short", "sm90_q_longd", "sm90_3xtf32", "sm90_3xfp16", "sm90_d", "sm80",
    "sm80_short_docs", "fp64",         "dequantized",  "sm90_stream", "sm80_q",      "sm80_d", "sm80_3xfp16"};
static_assert(std::size(kComputeNames) == kComputes && std::size(kKernelNames) == kForwardKernels);

}  // namespace

std::string name_of(Compute compute) { return kComputeNames[static_cast<int>(compute)]; }
std::string name_of(Sm80Tile tile) { return kTileNames[static_cast<int>(tile)]; }
std::string name_of(ForwardKernel kernel) { return kKernelNames[static_cast<int>(kernel)]; }

std::string name_of(Backward method) {
  return method == Backward::lowmem ? "lowmem" : method == Backward::unified ? "unified" : "auto";
}

namespace {

// Columns of the tiles that a document takes.
std::string tile_columns(const Sizes& s, const ForwardPlan& plan) {
  const std::string columns = std::to_string(plan.tokens);
  const auto* sm90_q = std::get_if<Sm90QConfig>(&plan.config);
  if (sm90_q != nullptr && sm90_q->two_widths) {
    return columns + " + " + std::to_string(second_width(plan.tokens));
  }
  return std::to_string(ceil_div(s.Ld, plan.tokens)) + " x " + columns;
}

// Why this kernel. It says what the plan shows, so that the planner's rules stand in the planner alone.
std::string why(const Sizes& s, const ForwardPlan& plan) {
  const int64_t rows = rows_per_document(s);
  const std::string together =
      std::to_string(rows) + (rows == 1 ? " query row meets" : " query rows meet") + " each document";
  switch (plan.kernel) {
    case ForwardKernel::fp64:
      return "float64 products, which no tile of the tensor cores serves";
    case ForwardKernel::dequantized:
      return "no kernel multiplies " + name_of(plan.compute) + " codes of this d on this device; " + together;
    case ForwardKernel::sm90_d:
      return together + ": as few as fit the narrow side of a tile, so documents take its wide side";
    case ForwardKernel::sm90_q_short: {
      const int span = plan.as<Sm90QShortConfig>().span, docs = plan.tokens / span;
      return together + ": " + std::to_string(plan.rows) + " of them share what is read of it; a tile has " +
             std::to_string(docs) + " documents of up to " + std::to_string(span) + " tokens";
    }
    case ForwardKernel::sm80_short_docs:
      return together + ": documents of " + std::to_string(s.Ld) +
             " tokens are read straight into operands, " +
             (plan.as<Sm80ShortDocsConfig>().members > 1 ? "a block" : "a warp") + " a document";
    case ForwardKernel::sm90_stream:
      return together + ": as many as a warp holds, and more documents than L2 does, which each warp streams";
    case ForwardKernel::sm80_q:
    case ForwardKernel::sm80_3xfp16:
      return "no wgmma kernel for this d and device: mma.sync; " + together + ": " +
             std::to_string(plan.rows) + " of them share what is read of it";
    case ForwardKernel::sm80_d:
      return "no wgmma kernel for this d and device: mma.sync; " + together +
             ": as few as fit its narrow side, " +
             (plan.as<Sm80DConfig>().members > 1 ? "a block a document" : "a warp a document");
    case ForwardKernel::sm80: {
      if (plan.compute == Compute::fp32) {
        return "float32 at full accuracy, which FFMA multiplies faster than this device's tensor cores; " +
               together;
      }
      const bool whole = s.d * element_bytes(plan.compute) % 16 == 0;
      const std::string portable = !whole ? "d is no whole number of 16 bytes, which wgmma needs: mma.sync"
                                   : element_bytes(plan.compute) == 4
                                       ? "float32 products of few query rows, or on this device: mma.sync"
                                       : "no wgmma kernel for this d and device: mma.sync";
      const int docs = plan.as<Sm80Config>().docs;
      return portable + "; " + together +
             (docs > 1 ? "; a tile has " + std::to_string(docs) + " short documents" : std::string());
    }
    default:
      break;
  }
  const std::string k_chunks =
      plan.kernel == ForwardKernel::sm90_q
          ? ""
          : "; embeddings of " + std::to_string(plan.k_chunks) + " x 128 bytes go by in chunks";
  return together + ": " + std::to_string(plan.rows) + " of them share what is read of it; " +
         tile_columns(s, plan) + " tokens cover " + std::to_string(s.Ld) + k_chunks;
}

std::string how_summed(const ForwardPlan& plan) {
  const std::string partials = "up to " + std::to_string(plan.partials) + " partial sums a query, added by ";
  if (plan.num_splits > 1) {
    return "in a second kernel, which combines the splits of each document" +
           (plan.partials == 1 ? std::string() : "; " + partials + "a third");
  }
  return plan.partials == 1 ? "a query's rows meet in one warp" : partials + "a second kernel";
}

std::string describe_tile(const ForwardPlan& plan) {
  switch (plan.kernel) {
    case ForwardKernel::sm90_q:
      return "wgmma, query rows on its M side";
    case ForwardKernel::sm90_q_short:
      return "wgmma, query rows on its M side, several documents a tile";
    case ForwardKernel::sm90_d:
      return "wgmma, documents on its M side";
    case ForwardKernel::sm80_q:
    case ForwardKernel::sm80_3xfp16:
      return "mma.sync, query rows on its M side";
    case ForwardKernel::sm80_d:
      return "mma.sync, documents on its M side";
    case ForwardKernel::sm80:
      return name_of(plan.as<Sm80Config>().tile);
    case ForwardKernel::sm90_stream:
      return "thin";
    case ForwardKernel::sm80_short_docs:
      return "thin";
    default:
      return "wgmma, query rows on its M side, embeddings in chunks";
  }
}

std::string describe_ring(const ForwardPlan& plan) {
  if (plan.kernel == ForwardKernel::sm80_short_docs) return "none: tokens go from memory to registers";
  if (const auto* sm80_q = std::get_if<Sm80QConfig>(&plan.config)) {
    return std::to_string(plan.stages) + " stages of whole tokens, " + std::to_string(32 * sm80_q->steps) +
           " bytes each";
  }
  if (const auto* sm80_d = std::get_if<Sm80DConfig>(&plan.config)) {
    return std::to_string(plan.stages) + " stages of whole tokens for each warp, " +
           std::to_string(32 * sm80_d->steps) + " bytes each";
  }
  const int chunk_bytes = (plan.kernel == ForwardKernel::sm90_3xfp16 ? 2 : 1) * kKChunkBytes;
  return std::to_string(plan.stages) + " stages, " + std::to_string(plan.k_chunks) + " of " +
         std::to_string(chunk_bytes) + " bytes a token to an embedding";
}

std::string where_q_is(const ForwardPlan& plan) {
  if (plan.kernel == ForwardKernel::sm90_stream || std::holds_alternative<Sm80QConfig>(plan.config) ||
      plan.kernel == ForwardKernel::sm80_d) {
    return "stays in registers";
  }
  if (plan.kernel == ForwardKernel::sm80_short_docs) {
    return plan.k_chunks > 2 ? "comes from L1, slice by slice" : "stays in registers";
  }
  const auto* sm80 = std::get_if<Sm80Config>(&plan.config);
  const auto* longd = std::get_if<Sm90QLongDConfig>(&plan.config);
  const bool streams = (sm80 != nullptr && sm80->stream_q) || (longd != nullptr && longd->stream_q);
  return std::string(streams ? "streams through the ring with D" : "stays in shared memory") +
         (longd != nullptr && longd->cluster > 1 ? ", half of it from the other block of a cluster" : "");
}

// What of the documents a work tile has.
std::string shared_unit(const ForwardPlan& plan) {
  const auto* sm80 = std::get_if<Sm80Config>(&plan.config);
  if (plan.kernel == ForwardKernel::sm90_q_short || (sm80 != nullptr && sm80->docs > 1)) {
    return "group of documents";
  }
  return plan.num_splits > 1 ? "split of a document" : "document";
}

// A line for each thing that is done to the columns of a tile.
std::string describe_columns(const Sizes& s, const ForwardPlan& plan) {
  Sm90QConfig how;
  if (const auto* q = std::get_if<Sm90QConfig>(&plan.config)) how = *q;
  if (const auto* longd = std::get_if<Sm90QLongDConfig>(&plan.config)) {
    how = {.masked = longd->masked, .scaled = longd->scaled};
  }
  if (const auto* tile = std::get_if<Sm90QShortConfig>(&plan.config)) how = {.masked = tile->masked};
  std::string lines;
  if (how.masked) {
    lines += std::string("masked     columns are left out one by one") +
             (how.trimmed ? ", of what a kernel before finds between the first and the last kept\n" : "\n");
  }
  if (how.compacted) {
    lines +=
        "compacted  by a kernel before: the kept tokens of documents with holes, or shorter than a tile\n";
  }
  if (plan.num_splits > 1) {
    lines += "splits     each document over " + std::to_string(plan.num_splits) + " blocks, some " +
             std::to_string(ceil_div(s.Ld, plan.num_splits)) +
             " tokens each: whole ones would leave multiprocessors idle\n";
  }
  if (how.compacted && has_tails(element_bytes(plan.compute), how.masked, how.scaled)) {
    lines += "tail       the last tile of a document is " + std::to_string(tail_width(plan.tokens)) +
             " tokens wide where what remains fits it\n";
  }
  if (plan.lpt) {
    lines += "schedule   documents go to the blocks of a row tile by length, longest first\n";
  }
  if (how.scaled) lines += "scaled     columns have scales of their own\n";
  return lines;
}

}  // namespace

std::string explain(const Sizes& s, const ForwardPlan& plan) {
  std::ostringstream out;
  const std::string reason = "why        " + why(s, plan) + "\n";
  if (plan.kernel == ForwardKernel::fp64) {
    return "kernel     maxsim_forward_fp64\ntile       none: a block for each query and document\ngrid      "
           " " +
           std::to_string(plan.grid) + " blocks\n" + reason;
  }
  if (plan.kernel == ForwardKernel::dequantized) {
    return "kernel     maxsim_forward of maxsim_dequantized, products in tf32: float32 copies of the codes, "
           "some documents at a time\n" +
           reason;
  }
  out << "kernel     maxsim_forward_" << name_of(plan.kernel) << ", products in "
      << (has_two_terms(plan.kernel) ? "3x" : "") << name_of(plan.compute) << "\n"
      << "tile       " << describe_tile(plan) << ": " << plan.rows << " query rows x " << plan.tokens
      << " document tokens\n"
      << "rows       "
      << (s.layout == Layout::in_batch ? "of all queries together, " : "of each query alone, ")
      << plan.row_tiles << (plan.row_tiles == 1 ? " tile\n" : " tiles\n") << "ring       "
      << describe_ring(plan) << "\n";
  if (const auto* sm90_d = std::get_if<Sm90DConfig>(&plan.config)) {
    out << "teams      " << sm90_d->teams << " of " << sm90_d->members
        << (sm90_d->members == 1 ? " warpgroup" : " warpgroups") << ", each with documents of its own\n";
  }
  out << "Q          " << where_q_is(plan) << "\n"
      << "memory     " << plan.smem_bytes << " bytes of shared memory a block, " << plan.blocks_per_sm
      << " blocks a multiprocessor\n"
      << describe_columns(s, plan) << "grid       " << plan.grid << " blocks share " << plan.work_tiles
      << " (row tile, " << shared_unit(plan) << ") work tiles\n"
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
  if (has_two_terms(plan.kernel) || plan.compute == Compute::tf32x3 || plan.compute == Compute::fp32) {
    return in("fp16", rates.fp16) + ", " + std::to_string(rates.tf32) + " in tf32, " +
           std::to_string(rates.ffma) + " by FFMA";
  }
  const int64_t bytes = element_bytes(plan.compute);
  if (plan.kernel == ForwardKernel::dequantized || bytes == 4) return in("tf32", rates.tf32);
  if (plan.compute == Compute::int8) return in("int8", rates.int8);
  if (bytes == 2) return in(name_of(plan.compute), rates.fp16);
  return rates.fp8 > 0 ? in("fp8", rates.fp8) : in("fp16, to which fp8 is widened", rates.fp16);
}

}  // namespace

std::string explain_rates(const ForwardPlan& plan, const Device& device) {
  if (plan.kernel == ForwardKernel::fp64) return "";
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
