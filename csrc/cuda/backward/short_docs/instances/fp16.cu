#include "../launch.cuh"

template cudaError_t late_interaction::launch_lone_query<__half>(const LoneQueryArgs&, cudaStream_t);
