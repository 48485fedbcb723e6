// fp32 inputs multiply as they are, or as half-precision copies: one pass over them, and then the tensor
// cores are twice as fast as in TF32.
#pragma once

#include "plan.h"

namespace late_interaction {

enum class Copies {
  none,
  bf16,
  fp16,
  // fp16 with as many significant bits as TF32 and, by powers of two, as wide a range: one for all of D, one
  // for each row of Q. With normalize, unit rows, which need none.
  scaled_fp16,
};

struct Multiplied {
  Copies copies = Copies::none;
  Dtype dtype = Dtype::fp32;  // of the copies
  Precision precision = Precision::highest;
};

// How a call of these inputs multiplies.
Multiplied plan_copies(const Sizes& sizes, Dtype dtype, Precision precision, bool masked,
                       const Device& device);

// One line, where there are copies.
std::string explain(Copies copies, bool normalize);

}  // namespace late_interaction
