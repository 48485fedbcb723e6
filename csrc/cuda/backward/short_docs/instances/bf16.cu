#include "../launch.cuh"

template cudaError_t late_interaction::launch_lone_query<__nv_bfloat16>(const LoneQueryArgs&, cudaStream_t);
