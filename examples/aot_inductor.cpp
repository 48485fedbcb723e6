// Scores queries and documents by a package of examples/aot_inductor.py, without Python:
//
//   aot_inductor LIBRARY PACKAGE       late_interaction/_C.abi3.so (and _cuda.abi3.so), scores.pt2
//
// Prints the scores of fixed inputs, a line a query; the Python program computes the same and compares.
#include <dlfcn.h>

#include <iostream>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: aot_inductor LIBRARY... PACKAGE\n";
    return 2;
  }
  // The libraries register the operators that the package calls.
  for (int i = 1; i + 1 < argc; ++i) {
    if (dlopen(argv[i], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      std::cerr << dlerror() << "\n";
      return 1;
    }
  }
  torch::inductor::AOTIModelPackageLoader package(argv[argc - 1]);
  const auto Q = at::arange(3 * 4 * 8, at::kFloat).sin().reshape({3, 4, 8});
  const auto D = at::arange(7 * 10 * 8, at::kFloat).cos().reshape({7, 10, 8});
  const auto d_mask = at::arange(10).unsqueeze(0) < at::arange(1, 8).unsqueeze(1);
  std::vector<at::Tensor> inputs = {Q, D, d_mask};
  const auto scores = package.run(inputs)[0];
  for (int64_t i = 0; i < scores.size(0); ++i) {
    for (int64_t j = 0; j < scores.size(1); ++j) std::cout << scores[i][j].item<float>() << " ";
    std::cout << "\n";
  }
}
