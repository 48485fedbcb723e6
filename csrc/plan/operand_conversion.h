// Inputs multiply as they are, or are converted to half precision first. fp32 takes one pass for it, and the
// tensor cores are then twice as fast as in TF32. If rows are to be normalized, the conversion replaces the
// pass that computes norms, and the similarities need no scales.
#pragma once

#include "plan.h"

namespace late_interaction {

enum class Copies {
  none,
  bf16,
  fp16,
  // fp16 with the significant bits and, by powers of two, the range of TF32: one for D, one a row of Q.
  scaled_fp16,
  // fp16, of bf16 and fp16 too: unit rows of D, and rows of Q times a power of two each.
  normalized_fp16,
  // Two fp16 numbers an element, together 22 significant bits, and powers of two: for each row of Q, and for
  // rows of D where they differ (forward/sm90_q_longd/fp32_3xfp16.cuh).
  fp16x2,
};

struct OperandConversion {
  Copies copies = Copies::none;
  Dtype dtype = Dtype::fp32;  // of the operands; fp16x2: of the inputs
  Precision precision = Precision::highest;
};

// The operands that a call converts its inputs to, if any.
OperandConversion plan_operand_conversion(const Sizes& sizes, Dtype dtype, Precision precision, bool masked,
                                          bool normalize, const Device& device);

// One line of explain_plan, where inputs are converted.
std::string explain(Copies copies, Dtype inputs);

}  // namespace late_interaction
