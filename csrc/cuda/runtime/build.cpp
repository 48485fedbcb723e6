// What this library was built for: its namespace, and for whoever packs it (tools/make_hub.py) CUDA's release
// as CUDART_VERSION has it, and the GPU architectures, joined by underscores.
#include <cuda_runtime_api.h>

#include "../../common/registration.h"

#ifndef LATE_INTERACTION_CUDA_ARCHS  // setup.py says it
#define LATE_INTERACTION_CUDA_ARCHS
#endif

LATE_INTERACTION_EMBED(namespace, LATE_INTERACTION_NAMESPACE)
LATE_INTERACTION_EMBED(cuda_version, CUDART_VERSION)
LATE_INTERACTION_EMBED(cuda_archs, LATE_INTERACTION_CUDA_ARCHS)
