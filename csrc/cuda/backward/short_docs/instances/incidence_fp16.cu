#include "../launch_incidence.cuh"

namespace late_interaction {

template cudaError_t launch_incidence<__half>(const IncidenceArgs&, const IncidencePlan&, cudaStream_t);

}  // namespace late_interaction
