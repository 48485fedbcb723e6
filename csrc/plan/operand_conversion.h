// Inputs multiply as they are, or are converted to half precision first. For fp32 the conversion is one pass
// over them, and the tensor cores are then twice as fast as in TF32. For rows to be normalized it takes the
// place of the pass that computes norms, and the similarities then need no scales.
#pragma once

#include "plan.h"

namespace late_interaction {

enum class Copies {
  none,
  bf16,
  fp16,  // of fp8 codes, exact
  // fp16 with as many significant bits as TF32 and, by powers of two, as wide a range: one for all of D, one
  // for each row of Q.
  scaled_fp16,
  // fp16 for products of unit rows: those of D, and rows of Q by a power of two each; bf16 and fp16 inputs
  // too.
  normalized_fp16,
  // Two fp16 numbers an element, which together have the 22 significant bits that count of fp32 products, and
  // powers of two: for each row of Q, and for rows of D where they differ:
  // forward/sm90_q_longd/fp32_3xfp16.cuh.
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
