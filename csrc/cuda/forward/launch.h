// How the host launches the forward kernels. Every launcher returns the launch's error and waits for nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "../../plan/forward/kernel.h"
#include "args.h"

namespace late_interaction {

// Args: ForwardArgs, or PairArgs for listed pairs.
template <class Args>
struct ForwardLaunch {
  const Args& args;
  const ForwardPlan& plan;
  cudaStream_t stream;
  // Operands of fp16x2 kernels. args has the fp32 inputs, and the scales that undo the operands' scales.
  const Fp16x2Tokens* fp16x2 = nullptr;
};

// Registers a kernel's launcher for one element type, and one number of steps where instances differ in it.
template <class Args = ForwardArgs>
class ForwardInstance {
 public:
  using Launcher = cudaError_t (*)(const ForwardLaunch<Args>&);

  ForwardInstance(const ForwardKernel& kernel, Compute compute, Launcher launcher, int steps = 0)
      : kernel_(&kernel), compute_(compute), steps_(steps), launcher_(launcher), next_(first()) {
    first() = this;
  }

  // Launches the kernel that the plan names.
  static cudaError_t launch(const ForwardLaunch<Args>& call) {
    const ForwardPlan& plan = call.plan;
    for (const ForwardInstance* each = first(); each != nullptr; each = each->next_) {
      if (each->kernel_ == plan.kernel && each->compute_ == plan.compute && each->steps_ == plan.steps) {
        return each->launcher_(call);
      }
    }
    return cudaErrorInvalidValue;
  }

 private:
  const ForwardKernel* kernel_;
  Compute compute_;
  int steps_;
  Launcher launcher_;
  const ForwardInstance* next_;

  static const ForwardInstance*& first() {
    static const ForwardInstance* instance = nullptr;
    return instance;
  }
};

// Calls launch.operator()<kValue>() with the one of kValues that `value` is.
template <auto... kValues, class T, class Launch>
cudaError_t choose(T value, Launch launch) {
  cudaError_t error = cudaErrorInvalidValue;
  ((value == kValues && (error = launch.template operator()<kValues>(), true)) || ...);
  return error;
}

// The same with the numbers of an array.
template <const auto& kValues, class T, class Launch>
cudaError_t choose_from(T value, Launch launch) {
  return [&]<size_t... kAt>(std::index_sequence<kAt...>) {
    return choose<kValues[kAt]...>(value, launch);
  }(std::make_index_sequence<kValues.size()>{});
}

// Calls launch.operator()<kWinners>(). Scores of codes have no gradients: nobody asks for their winners.
template <class Element, class Launch>
cudaError_t choose_winners(const ForwardArgs& args, Launch launch) {
  if constexpr (sizeof(Element) > 1) {
    if (args.winners != nullptr) return launch.template operator()<true>();
  }
  return launch.template operator()<false>();
}

// A file in instances/ consists of this line, outside all namespaces: it registers launch_<kernel> of one
// type, of one type and number of steps, or of one type for listed pairs.
#define LATE_INTERACTION_FORWARD(kernel, type) \
  LATE_INTERACTION_REGISTER_FORWARD(ForwardArgs, kernel, type, 0, launch_##kernel<Compute::type>)
#define LATE_INTERACTION_FORWARD_STEPS(kernel, type, steps) \
  LATE_INTERACTION_REGISTER_FORWARD(ForwardArgs, kernel, type, steps, launch_##kernel<Compute::type, steps>)
#define LATE_INTERACTION_FORWARD_PAIRS(kernel, type) \
  LATE_INTERACTION_REGISTER_FORWARD(PairArgs, kernel, type, 0, launch_##kernel<Compute::type, PairArgs>)
#define LATE_INTERACTION_REGISTER_FORWARD(Args, kernel, type, steps, ...)                                 \
  namespace late_interaction {                                                                            \
  const ForwardInstance<Args> k_##kernel##_##type##_##steps(kernel, Compute::type, (__VA_ARGS__), steps); \
  }

// Writes each document's token range: from the first kept token to the last. With buffers in `copies` a range
// has the kept tokens alone, compacted; a token then is at most 16 whole vectors of 16 bytes.
cudaError_t launch_doc_ranges(const ForwardArgs& args, int64_t documents, const CompactedTokens& copies,
                              DocRange* doc_ranges, cudaStream_t stream);

// Writes the ranges [documents * num_splits] of split documents: whole tiles of tile_tokens, less the tokens
// that the mask drops at either end of a split.
cudaError_t launch_split_doc_ranges(const ForwardArgs& args, int tile_tokens, DocRange* doc_ranges,
                                    cudaStream_t stream);

// Slots of packed documents (sm90_q_short/slots.cu).
struct ShortSlots {
  const Span* spans;  // [documents]
  int64_t documents;
  int32_t span, docs;  // tokens of a slot, slots of a group
  // Outputs.
  DocRange* slots;   // [capacity + docs + 1]: argmax_base counts from a document's first token; behind the
                     // last slot document is -1
  int64_t capacity;  // slots that there are at most
  int32_t* work_tile_ends;  // [blocks + 1], in (row tile, document group); the last is the number of groups
  int64_t blocks, row_tiles;
};
cudaError_t launch_short_slots(const ShortSlots& slots, cudaStream_t stream);

// Combines the maxima of splits into scores, and winners where args has them. If a query has more rows than a
// block combines, `scores` are partials [Nq, args.partials, documents].
cudaError_t launch_combine_splits(const ForwardArgs& args, float* scores, cudaStream_t stream);

// scores[i * stride + j] = sum over p of partials[i, p, j], in order.
cudaError_t launch_reduce_partials(const ForwardArgs& args, const ForwardPlan& plan, float* scores,
                                   int64_t stride, cudaStream_t stream);

}  // namespace late_interaction
