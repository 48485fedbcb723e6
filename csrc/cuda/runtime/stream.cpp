#include "stream.h"

#include <dlfcn.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace late_interaction {

namespace {

using GetStream = int32_t (*)(int32_t device, void** stream);

// The symbol lives in libtorch_cuda, which a CUDA build of PyTorch has loaded by the time a CUDA tensor
// exists. Looking it up keeps this library loadable without it; a weak symbol would resolve to null instead.
GetStream find_get_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
  STD_TORCH_CHECK(symbol != nullptr,
                  "late_interaction: this PyTorch has no CUDA, but was given a CUDA tensor");
  return reinterpret_cast<GetStream>(symbol);
}

}  // namespace

cudaStream_t current_stream(int device) {
  static const GetStream get_stream = find_get_stream();
  void* stream = nullptr;
  STD_TORCH_CHECK(get_stream(device, &stream) == 0, "late_interaction: no current stream for CUDA device ",
                  device);
  return static_cast<cudaStream_t>(stream);
}

}  // namespace late_interaction
