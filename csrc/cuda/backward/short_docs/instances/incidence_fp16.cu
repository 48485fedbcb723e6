#include "../launch_incidence.cuh"

template cudaError_t late_interaction::launch_incidence<__half>(const IncidenceArgs&, const IncidencePlan&,
                                                                cudaStream_t);
