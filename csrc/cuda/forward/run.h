// The forward, from parsed inputs to scores and winners, for every operator that scores.
#pragma once

#include <string>

#include "../../common/tensors.h"
#include "../../plan/operand_conversion.h"
#include "../../plan/plan.h"
#include "../runtime/op_helpers.h"
#include "../runtime/tma_descriptors.h"
#include "operands/fp16x2.h"

namespace late_interaction {

inline ForwardTraits traits_of(const Inputs& in, Precision precision, bool scaled) {
  return {.dtype = in.dtype,
          .precision = precision,
          .masked = in.d_mask.data != nullptr,
          .packed = in.packed.has_value(),
          .scaled = scaled,
          .tma_compatible = aligned(in.Q, in) && aligned(in.D, in) && fits_tensor_maps(in)};
}

struct PairPick;  // pairs/index.h

// Scales that similarities are multiplied by (primitives/token_scales.cuh).
struct TokenScaleViews {
  ScaleView q, d;
  const float* shared = nullptr;
};

// Computes scores, and winners where given; of packed inputs with `pick`, the picked pairs of them. The
// inputs are in the dtype that they multiply in; with `fp16x2`, those operands of them multiply instead.
void forward_into(const Inputs& in, bool normalize, const TokenScaleViews& token_scales, Precision precision,
                  const Tensor& like, const Tensor& scores, const OptionalTensor& winners,
                  const PairPick* pick = nullptr, const Fp16x2Tokens* fp16x2 = nullptr);

// Whether the inputs of a call multiply as they are, or which operands they are converted to.
OperandConversion operand_conversion(const Inputs& in, const std::string& precision, bool normalize,
                                     int device);

// Converts the inputs as `how` says, and computes scores, and winners where given.
void score_into(const Tensor& Q, const Tensor& D, const OptionalTensor& q_mask, const OptionalTensor& d_mask,
                const Inputs& in, bool normalize, const OperandConversion& how, const Tensor& scores,
                const OptionalTensor& winners);

}  // namespace late_interaction
