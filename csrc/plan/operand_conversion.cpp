#include "operand_conversion.h"

#include <algorithm>

#include "forward/select.h"
#include "forward/tiles.h"
#include "text.h"

namespace late_interaction {

namespace {

// Query rows of a document token from which products outweigh the pass that makes copies. With fewer, reading
// fp32 once and multiplying it in TF32 is faster, and more accurate than bf16.
constexpr int64_t kRows = 2048;

// Unit rows are made from rows in registers, counted in 32 bits.
constexpr int64_t kLongestUnitRow = 1024, kMostUnitRows = int64_t{1} << 30;

// The same at full accuracy, where a row's products take three times as long. The copies are as large as the
// inputs, so their memory is limited.
constexpr int64_t kExactRows = 256, kMostHalves = int64_t{4} << 30;
constexpr double kExactWork = 2e9;

bool worth_3xfp16(const Sizes& s, bool masked, const Device& device) {
  const FullAccuracyRates rates = full_accuracy_rates(device);
  if (!device.wgmma && rates.fp16x3 < std::max(rates.tf32x3, rates.ffma)) return false;
  return rows_per_document(s) >= kExactRows && 2.0 * s.Nq * s.Lq * s.N * s.Ld * s.d >= kExactWork &&
         4 * (s.documents() * s.Ld + s.Nq * s.Lq) * s.d <= kMostHalves &&
         plan_3xfp16(s, masked, true, device).has_value();
}

// True if a kernel takes fp16 copies, of rows of whole 16 bytes.
bool has_kernel(const Sizes& s, bool masked, const Device& device) {
  const ForwardTraits traits{.dtype = Dtype::fp16,
                             .masked = masked,
                             .scaled = !device.wgmma,  // for the kernels that know them
                             .tma_compatible = s.d % 8 == 0};
  return s.N > 0 && s.Ld > 0 && plan_forward(s, traits, device).kernel->takes_fp16_copies;
}

bool may_be_normalized_fp16(const Sizes& s) {
  return s.d <= kLongestUnitRow && s.documents() * s.Ld <= kMostUnitRows && s.Nq * s.Lq <= kMostUnitRows;
}

// Copies of bf16 and fp16 rows that are to be normalized. A copy reads and writes four bytes an element,
// norms read two; scales in the fold take about 15% of the time of products of 128 dims, and less of longer
// ones: at 1024 rows that is as long, unless the copies stay in L2. With a mask kept tokens are copied
// already, and two copies would be more memory than the gradients will be.
bool worth_normalized_fp16(const Sizes& s, bool masked, const Device& device) {
  constexpr int64_t kMostBytes = int64_t{1} << 30, kStays = int64_t{24} << 20, kRowsThen = 1024;
  const int64_t capacity = 2 * (s.documents() * s.Ld + s.Nq * s.Lq) * s.d;
  return !masked && rows_per_document(s) >= (capacity <= kStays ? kRowsThen : kRows) &&
         capacity <= kMostBytes && s.d % 8 == 0 && may_be_normalized_fp16(s) && has_kernel(s, masked, device);
}

}  // namespace

OperandConversion plan_operand_conversion(const Sizes& s, Dtype dtype, Precision precision, bool masked,
                                          bool normalize, const Device& device) {
  const OperandConversion unit{Copies::normalized_fp16, Dtype::fp16, Precision::highest};
  if (dtype == Dtype::bf16 || dtype == Dtype::fp16) {
    if (normalize && worth_normalized_fp16(s, masked, device)) return unit;
    return {Copies::none, dtype, precision};
  }
  if (dtype != Dtype::fp32) return {Copies::none, dtype, precision};
  if (precision == Precision::highest) {
    return {worth_3xfp16(s, masked, device) ? Copies::fp16x2 : Copies::none, dtype, precision};
  }
  const OperandConversion as_they_are{Copies::none, dtype, Precision::high};
  if (rows_per_document(s) < kRows || s.N == 0 || s.Ld == 0) return as_they_are;
  const bool served = has_kernel(s, masked, device);
  if (normalize && served && may_be_normalized_fp16(s)) return unit;
  if (precision == Precision::medium) return {Copies::bf16, Dtype::bf16, Precision::highest};
  if (precision == Precision::fp16) return {Copies::fp16, Dtype::fp16, Precision::highest};
  if (!served || normalize) return as_they_are;
  return {Copies::scaled_fp16, Dtype::fp16, Precision::highest};
}

std::string explain(Copies copies, Dtype inputs) {
  const bool fp32 = inputs == Dtype::fp32;
  const std::string of = fp32 ? "fp32 inputs, in " : "inputs, in ";
  const std::string as_tf32 = "the significant bits of TF32, at twice its speed";
  const std::string forms[] = {
      "",
      of + "bf16",
      of + "fp16",
      of + "fp16, scaled by powers of two: " + as_tf32,
      of + "fp16, normalized: " + (fp32 ? as_tf32 : "11 significant bits, and no scales"),
      "fp32 inputs, two fp16 numbers an element: 22 significant bits",
  };
  return copies == Copies::none ? "" : joined("copies     of the ", forms[static_cast<int>(copies)], "\n");
}

}  // namespace late_interaction
