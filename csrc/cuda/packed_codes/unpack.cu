// Bits as int8 codes, for products that no kernel of bits computes.
#include <algorithm>

#include "../../common/arithmetic.h"
#include "args.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) unpack_bits(const UnpackArgs args) {
  const int64_t count = args.rows * args.width;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < count;
       at += int64_t{gridDim.x} * kThreads) {
    const int64_t row = at / args.width, dim = at - row * args.width;
    const uint8_t byte = args.bits[row * args.bytes + min(dim, args.d - 1) / 8];
    args.codes[at] = static_cast<int8_t>(dim < args.d ? (byte >> dim % 8 & 1) * 2 - 1 : 0);
  }
}

}  // namespace

cudaError_t launch_unpack_bits(const UnpackArgs& args, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>(ceil_div(args.rows * args.width, kThreads), 1 << 16);
  if (blocks == 0) return cudaSuccess;
  unpack_bits<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace late_interaction
