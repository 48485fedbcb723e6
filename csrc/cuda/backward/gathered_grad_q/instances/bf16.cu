#include "../launch.cuh"

template cudaError_t late_interaction::launch_gathered_grad_q<__nv_bfloat16>(const BackwardArgs&,
                                                                             const GatheredGradQPlan&,
                                                                             cudaStream_t);
