#include "l2_parts.h"

#include <algorithm>
#include <cstdint>

#include "backward/tiled_grad_d.h"
#include "text.h"

namespace late_interaction {

namespace {

// Rows of a forward's tile, about.
constexpr int64_t kTileRows = 128;

// Bytes of winners and scores from which on a batch is large: the sums over parts are small beside them.
constexpr int64_t kManyWinners = 256 << 20;

int64_t winner_bytes(const Sizes& s) { return s.Nq * s.N * ((wide_winners(s.Ld) ? 4 : 2) * s.Lq + 4); }

// The largest part that `bytes` hold, where `count` falls into parts of about the same size.
int64_t even_part(int64_t count, int64_t bytes_each, int64_t bytes) {
  const int64_t most = std::max<int64_t>(1, bytes / std::max<int64_t>(bytes_each, 1));
  return ceil_div(count, ceil_div(count, most));
}

}  // namespace

int64_t documents_at_once(const Sizes& s, Dtype dtype, const Device& device) {
  const int64_t document = s.Ld * s.d * element_bytes(dtype);
  // With fewer row tiles, documents come from memory about once: blocks share them out.
  const bool many_rows = s.Nq * s.Lq >= kTileRows * device.sm_count / 2;
  if (s.layout != Layout::in_batch || dtype == Dtype::fp64 || !many_rows ||
      s.N * document <= device.l2_bytes / 2) {
    return s.N;
  }
  return even_part(s.N, document, device.l2_bytes / 3);
}

BatchPart backward_part(const Sizes& s, Dtype dtype, const Device& device, BackwardReads reads,
                        bool sums_at_hand) {
  const int64_t query = s.Lq * s.d * element_bytes(dtype), document = s.Ld * s.d * element_bytes(dtype);
  const bool large = sums_at_hand || winner_bytes(s) >= kManyWinners;
  if (s.layout != Layout::in_batch || dtype == Dtype::fp64 || !large ||
      (s.Nq * query <= device.l2_bytes / 8 && s.N * document <= device.l2_bytes / 2)) {
    return {s.Nq, s.N};
  }
  // Documents that are not gathered count for the sums of their gradients.
  const int64_t documents = reads == BackwardReads::both_sides ? device.l2_bytes / 4 : device.l2_bytes;
  return {even_part(s.Nq, query, device.l2_bytes / 8), even_part(s.N, document, documents)};
}

BatchPart recompute_part(const Sizes& s, Dtype dtype, const Device& device) {
  constexpr int64_t kMostWinners = 64 << 20;
  BatchPart part = backward_part(s, dtype, device, BackwardReads::both_sides, false);
  if (part.queries >= s.Nq && part.documents >= s.N) return part;
  // More queries than in backward_part fill the device with kernels that read documents from shared memory.
  part.queries = even_part(s.Nq, s.Lq * s.d * element_bytes(dtype), device.l2_bytes / 2);
  part.documents = std::min(
      part.documents, std::max<int64_t>(1, kMostWinners / (winner_bytes(s) / (s.Nq * s.N) * part.queries)));
  // grad_D by tiles (backward/tiled_grad_d.h) is refused where its last wave leaves many SMs idle.
  const int64_t wave = int64_t{grad_d_docs(s.Ld, device.wgmma)} * device.sm_count;
  if (part.documents > wave) part.documents = even_part(s.N, 1, part.documents / wave * wave);
  return part;
}

PackedParts packed_backward_parts(const Sizes& s, Dtype dtype, const Device& device) {
  const PackedParts whole{s.N, s.Lq};
  const int64_t row = s.d * element_bytes(dtype), document = s.Ld * row;
  const int64_t winner = wide_winners(s.N * s.Ld) ? 4 : 2, winners = winner * s.N * s.Lq;
  // A smaller batch does not repay launches and sums. A copy by rows has a pitch of 31 bits.
  const bool large = winners >= 4 * device.l2_bytes && winner * s.Lq <= INT32_MAX;
  if (dtype == Dtype::fp64 || !large) return whole;
  PackedParts parts = whole;
  // With fewer rows than fill the device, a part of the documents would be too little work.
  const bool many_rows = s.Lq >= kTileRows * device.sm_count / 2;
  if (many_rows && s.N * document > device.l2_bytes / 2) {
    parts.documents = even_part(s.N, document, device.l2_bytes / 4);
  }
  if (s.Lq * row > device.l2_bytes / 8) {
    constexpr int64_t kStep = 64;  // so that winners of a part are aligned
    parts.rows = std::min(s.Lq, round_up(even_part(s.Lq, row, device.l2_bytes / 8), kStep));
  }
  // Bytes beside the gradients: sums over parts, and the winners of a part of the rows.
  const int64_t sum = element_bytes(dtype) == 4 ? 0 : 4 * s.d;
  const bool by_documents = parts.documents < s.N, by_rows = parts.rows < s.Lq;
  const int64_t taken =
      (by_documents ? sum * s.Lq : 0) + (by_rows ? sum * s.N * s.Ld + winner * s.N * parts.rows : 0);
  return taken <= winners / 2 ? parts : whole;
}

std::string explain_documents_at_once(const Sizes& s, int64_t documents) {
  if (documents >= s.N) return "";
  return joined("L2         ", documents, " documents a launch, which stay in L2 while all ", s.Nq,
                " queries meet them\n");
}

std::string explain(const Sizes& s, const BatchPart& part) {
  if (part.queries >= s.Nq && part.documents >= s.N) return "";
  return joined("L2         ", part.queries, " queries with ", part.documents,
                " documents a launch, whose rows stay in L2\n");
}

std::string explain(const Sizes& s, const PackedParts& parts) {
  std::string lines;
  if (parts.documents < s.N) {
    lines += joined("L2         grad_Q by ", parts.documents, " documents a launch, whose rows stay in L2\n");
  }
  if (parts.rows < s.Lq) {
    lines += joined("L2         grad_D by ", parts.rows, " rows of Q a launch, which stay in L2\n");
  }
  return lines;
}

}  // namespace late_interaction
