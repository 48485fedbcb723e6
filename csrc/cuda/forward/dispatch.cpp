// The forward kernels that are compiled.
#include "launch.h"

namespace late_interaction {

namespace {

using Kernel = ForwardKernel;

// Calls launch<kSteps>() for the products that an embedding takes, of kMmaSteps.
template <Compute kCompute, class Launch>
cudaError_t with_steps(int steps, const Launch& launch) {
  if (steps == 4) return launch.template operator()<4>();
  constexpr bool kCodes = kCompute == Compute::int8 || kCompute == Compute::e4m3 || kCompute == Compute::e5m2;
  if constexpr (!kCodes) {
    if (steps == 16) return launch.template operator()<16>();
  }
  return launch.template operator()<8>();
}

template <Compute kCompute>
cudaError_t launch_sm80_q(const ForwardLaunch<ForwardArgs>& call) {
  return with_steps<kCompute>(call.plan.as<Sm80QConfig>().steps,
                              [&]<int kSteps>() { return launch_sm80_q_steps<kCompute, kSteps>(call); });
}

template <Compute kCompute>
cudaError_t launch_sm80_d(const ForwardLaunch<ForwardArgs>& call) {
  return with_steps<kCompute>(call.plan.as<Sm80DConfig>().steps,
                              [&]<int kSteps>() { return launch_sm80_d_steps<kCompute, kSteps>(call); });
}

constexpr ForwardInstances<ForwardArgs> kInstances{
    {Kernel::sm90_q, Compute::bf16, launch_sm90_q<Compute::bf16>},
    {Kernel::sm90_q, Compute::fp16, launch_sm90_q<Compute::fp16>},
    {Kernel::sm90_q, Compute::e4m3, launch_sm90_q<Compute::e4m3>},
    {Kernel::sm90_q, Compute::e5m2, launch_sm90_q<Compute::e5m2>},
    {Kernel::sm90_q, Compute::int8, launch_sm90_q<Compute::int8>},
    {Kernel::sm90_q_short, Compute::bf16, launch_sm90_q_short<Compute::bf16>},
    {Kernel::sm90_q_short, Compute::fp16, launch_sm90_q_short<Compute::fp16>},
    {Kernel::sm90_q_longd, Compute::bf16, launch_sm90_q_longd<Compute::bf16>},
    {Kernel::sm90_q_longd, Compute::fp16, launch_sm90_q_longd<Compute::fp16>},
    {Kernel::sm90_q_longd, Compute::tf32, launch_sm90_q_longd<Compute::tf32>},
    {Kernel::sm90_q_longd, Compute::e4m3, launch_sm90_q_longd<Compute::e4m3>},
    {Kernel::sm90_q_longd, Compute::e5m2, launch_sm90_q_longd<Compute::e5m2>},
    {Kernel::sm90_q_longd, Compute::int8, launch_sm90_q_longd<Compute::int8>},
    {Kernel::sm90_3xtf32, Compute::tf32x3, launch_sm90_3xtf32},
    {Kernel::sm90_3xfp16, Compute::fp16, launch_sm90_3xfp16},
    {Kernel::sm90_d, Compute::bf16, launch_sm90_d<Compute::bf16>},
    {Kernel::sm90_d, Compute::fp16, launch_sm90_d<Compute::fp16>},
    {Kernel::sm90_d, Compute::e4m3, launch_sm90_d<Compute::e4m3>},
    {Kernel::sm90_d, Compute::e5m2, launch_sm90_d<Compute::e5m2>},
    {Kernel::sm90_d, Compute::int8, launch_sm90_d<Compute::int8>},
    {Kernel::sm80_q, Compute::bf16, launch_sm80_q<Compute::bf16>},
    {Kernel::sm80_q, Compute::fp16, launch_sm80_q<Compute::fp16>},
    {Kernel::sm80_q, Compute::e4m3, launch_sm80_q<Compute::e4m3>},
    {Kernel::sm80_q, Compute::e5m2, launch_sm80_q<Compute::e5m2>},
    {Kernel::sm80_q, Compute::int8, launch_sm80_q<Compute::int8>},
    {Kernel::sm80_3xfp16, Compute::fp16, launch_sm80_3xfp16},
    {Kernel::sm80_d, Compute::bf16, launch_sm80_d<Compute::bf16>},
    {Kernel::sm80_d, Compute::fp16, launch_sm80_d<Compute::fp16>},
    {Kernel::sm80_d, Compute::e4m3, launch_sm80_d<Compute::e4m3>},
    {Kernel::sm80_d, Compute::e5m2, launch_sm80_d<Compute::e5m2>},
    {Kernel::sm80_d, Compute::int8, launch_sm80_d<Compute::int8>},
    {Kernel::sm80, Compute::bf16, launch_sm80<Compute::bf16>},
    {Kernel::sm80, Compute::fp16, launch_sm80<Compute::fp16>},
    {Kernel::sm80, Compute::tf32, launch_sm80<Compute::tf32>},
    {Kernel::sm80, Compute::tf32x3, launch_sm80<Compute::tf32x3>},
    {Kernel::sm80, Compute::fp32, launch_sm80<Compute::fp32>},
    {Kernel::sm80_short_docs, Compute::bf16, launch_sm80_short_docs<Compute::bf16>},
    {Kernel::sm80_short_docs, Compute::fp16, launch_sm80_short_docs<Compute::fp16>},
    {Kernel::sm90_stream, Compute::bf16, launch_sm90_stream<Compute::bf16>},
    {Kernel::sm90_stream, Compute::fp16, launch_sm90_stream<Compute::fp16>},
    {Kernel::fp64, Compute::fp64, launch_fp64<ForwardArgs>},
};

}  // namespace

cudaError_t launch_forward(const ForwardLaunch<ForwardArgs>& call) { return kInstances.launch(call); }

}  // namespace late_interaction
