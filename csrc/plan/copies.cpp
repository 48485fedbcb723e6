#include "copies.h"

#include "halves.h"

namespace late_interaction {

namespace {

// Query rows that meet each document token from which products outweigh the pass that makes copies. With
// fewer, reading fp32 once and multiplying it in TF32 is faster, and more accurate than bf16.
constexpr int64_t kRows = 2048;

// The same at full accuracy, where a row's products take three times as long, and the copies are no smaller
// than what they are of: they may take some memory, no more.
constexpr int64_t kExactRows = 256, kMostHalves = int64_t{4} << 30;
constexpr double kExactWork = 2e9;

bool worth_halves(const Sizes& s, bool masked, const Device& device) {
  const int64_t rows = s.layout == Layout::in_batch ? s.Nq * s.Lq : s.Lq;
  return rows >= kExactRows && 2.0 * s.Nq * s.Lq * s.N * s.Ld * s.d >= kExactWork &&
         4 * (s.documents() * s.Ld + s.Nq * s.Lq) * s.d <= kMostHalves &&
         plan_halves(s, masked, device).has_value();
}

bool on_wgmma(const ForwardPlan& plan) {
  return plan.tile == Tile::wgmma_rows || plan.tile == Tile::wgmma_split ||
         plan.tile == Tile::wgmma_documents;
}

}  // namespace

Multiplied plan_copies(const Sizes& s, Dtype dtype, Precision precision, bool masked, const Device& device) {
  if (dtype != Dtype::fp32) return {Copies::none, dtype, precision};
  if (precision == Precision::highest) {
    return {worth_halves(s, masked, device) ? Copies::halves : Copies::none, dtype, precision};
  }
  const int64_t rows = s.layout == Layout::in_batch ? s.Nq * s.Lq : s.Lq;
  const Multiplied as_they_are{Copies::none, dtype, Precision::high};
  if (rows < kRows || s.N == 0 || s.Ld == 0) return as_they_are;
  if (precision == Precision::medium) return {Copies::bf16, Dtype::bf16, Precision::highest};
  if (precision == Precision::fp16) return {Copies::fp16, Dtype::fp16, Precision::highest};
  // Of kernels that know factors of the rows, with rows of whole 16 bytes.
  const ForwardTraits traits{
      .dtype = Dtype::fp16, .precision = Precision::highest, .masked = masked, .copy_engine = s.d % 8 == 0};
  if (!on_wgmma(plan_forward(s, traits, device))) return as_they_are;
  return {Copies::scaled_fp16, Dtype::fp16, Precision::highest};
}

std::string explain(Copies copies, bool normalize) {
  switch (copies) {
    case Copies::none:
      return "";
    case Copies::bf16:
      return "copies     of the fp32 inputs, in bf16\n";
    case Copies::fp16:
      return "copies     of the fp32 inputs, in fp16\n";
    case Copies::halves:
      return "copies     of the fp32 inputs, two fp16 numbers an element: 22 significant bits\n";
    case Copies::scaled_fp16:
      break;
  }
  return std::string("copies     of the fp32 inputs, in fp16, ") +
         (normalize ? "normalized" : "scaled by powers of two") +
         ": the significant bits of TF32, at twice its speed\n";
}

}  // namespace late_interaction
