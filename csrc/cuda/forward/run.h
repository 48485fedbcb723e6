// The forward, from parsed inputs to scores and winners, for every operator that scores.
#pragma once

#include <string>

#include "../../common/tensors.h"
#include "../../plan/operand_conversion.h"
#include "../../plan/plan.h"
#include "../runtime/op_helpers.h"
#include "launch.h"

namespace late_interaction {

// Factors of similarities (primitives/token_scales.cuh).
struct TokenScaleViews {
  ScaleView q, d;
  const float* shared = nullptr;
};

// The kernel reads these operands and writes these results.
struct ForwardCall {
  const Inputs& in;  // in the dtype of the products
  Precision precision = Precision::highest;
  bool normalize = false;
  TokenScaleViews token_scales{};
  const Tensor& scores;
  const OptionalTensor& winners;
  const Fp16x2Tokens* fp16x2 = nullptr;  // operands that multiply instead of the inputs
  // scores and winners have room for all_documents, of which `in` has in.sizes.N from first_document on.
  int64_t first_document = 0, all_documents = in.sizes.N;

  // The same call of other inputs.
  ForwardCall with(const Inputs& other) const {
    return {other,   precision, normalize,      token_scales, scores,
            winners, fp16x2,    first_document, all_documents};
  }

  // No products: every score is an empty sum.
  bool is_empty() const { return scores.numel() == 0 || in.sizes.Lq == 0 || in.sizes.Ld == 0; }
};

// ---- stages, for the operators that put them together themselves (varlen, pairs) ----

ForwardTraits traits_of(const Inputs& in, Precision precision, bool scaled);

// Scores of 0, and sentinels for winners.
void fill_empty(const ForwardCall& call, cudaStream_t stream);

// The kernels' arguments, but for what later stages add.
ForwardArgs forward_args(const ForwardCall& call, const ForwardPlan& plan);

// Token ranges of documents, and the compacted tokens that some ranges read.
struct DocRangeBuffers {
  Tensor doc_ranges;
  OptionalTensor tokens, token_scales, positions;
  CompactedTokens compacted{};

  DocRangeBuffers(const Inputs& in, const ForwardPlan& plan, const Tensor& like);
  DocRange* data() const { return static_cast<DocRange*>(doc_ranges.data_ptr()); }
};

// ---- all stages, for dense inputs ----

// Computes scores, and winners where the call has them.
void forward_into(const ForwardCall& call);

// The operands that the inputs of a call are converted to, if any.
OperandConversion operand_conversion(const Inputs& in, const std::string& precision, bool normalize,
                                     int device);

// Converts the inputs Q and D, parsed as `in`, as `how` says, and computes scores, and winners where given.
void score_into(const Tensor& Q, const Tensor& D, const Inputs& in, bool normalize,
                const OperandConversion& how, const Tensor& scores, const OptionalTensor& winners);

}  // namespace late_interaction
