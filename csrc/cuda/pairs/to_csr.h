// Listed pairs sorted by name, a query or a document; defined in to_csr.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace late_interaction {

// Name k has the pairs order[begins[k]] to order[begins[k + 1] - 1], in the order of the list.
struct PairsCsr {
  const int32_t* names;  // [pairs], of [0, count); any other is no name, and its pairs come last
  int64_t pairs, count;
  int64_t* order;   // [pairs]
  int32_t* begins;  // [count + 1]
  int32_t* counts;  // [counting_buffer_size]
  bool pdl;         // blocks may start while the kernel before them ends
};

// The numbers of the counting buffer; 0: there is so much to count that sorting is faster.
int64_t counting_buffer_size(int64_t pairs, int64_t count);
cudaError_t launch_csr_by_counting(const PairsCsr& csr, cudaStream_t stream);

// begins[k], k in [0, count]: how many of the sorted names lie below k.
cudaError_t launch_csr_of_sorted(const int32_t* sorted, int64_t pairs, int64_t count, int32_t* begins,
                                 cudaStream_t stream);

}  // namespace late_interaction
