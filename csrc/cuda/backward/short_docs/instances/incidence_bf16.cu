#include "../launch_incidence.cuh"

template cudaError_t late_interaction::launch_incidence<__nv_bfloat16>(const IncidenceArgs&,
                                                                       const IncidencePlan&, cudaStream_t);
