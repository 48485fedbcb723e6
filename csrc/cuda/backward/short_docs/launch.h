// The backward kernels of short documents, as the host calls them, of one 2-byte element type each:
// instantiated in instances/. Each launch returns its error and waits for nothing.
#pragma once

#include <cuda_runtime.h>

#include "args.h"

namespace late_interaction {

// grad_D, unless args.grad_D is null, and args.partials and grad_Q from them, unless args.grad_Q is null:
// defined in launch.cuh.
template <class T>
cudaError_t launch_lone_query(const LoneQueryArgs& args, cudaStream_t stream);

// grad_Q or grad_D: defined in launch_incidence.cuh.
template <class T>
cudaError_t launch_incidence(const IncidenceArgs& args, const IncidencePlan& plan, cudaStream_t stream);

}  // namespace late_interaction
