// The backward kernels of short documents, as the host calls them. Each launch returns its error and waits
// for nothing.
#pragma once

#include <cuda_runtime.h>

#include "../../../plan/backward/short_docs.h"
#include "args.h"

namespace late_interaction {

// The launchers of one 2-byte element type: defined in launch.cuh, instantiated in instances/.
template <class T>
struct ShortDocsLauncher {
  // grad_D, unless args.grad_D is null, and args.partials and grad_Q from them, unless args.grad_Q is null.
  static cudaError_t lone_query(const LoneQueryArgs& args, const LoneQueryPlan& plan, cudaStream_t stream);
};

// grad_Q or grad_D: defined in launch_incidence.cuh.
template <class T>
cudaError_t launch_incidence(const IncidenceArgs& args, const IncidencePlan& plan, cudaStream_t stream);

}  // namespace late_interaction
