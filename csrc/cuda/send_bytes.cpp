// Pageable host memory to the device by way of pinned pieces. A thread fills two pieces of its own in turn
// and sends them itself: nobody waits for another thread, and a piece that is used again soon is still in the
// CPU's cache when it is written, and when the bus reads it.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "../common/tensors.h"
#include "check.h"
#include "stream.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;

constexpr int64_t kTurns = 2;  // pieces of a thread

struct Transfer {
  uint8_t* to;
  const uint8_t* source;
  int64_t bytes;
  uint8_t* rooms;
  int64_t room;             // bytes of a piece
  const cudaEvent_t* left;  // of each piece: when what was in it has left it
  cudaStream_t stream;
};

// Takes pieces from the counter until none is left.
cudaError_t send_pieces(const Transfer& x, int64_t thread, std::atomic<int64_t>& next) {
  for (int64_t turn = 0;; ++turn) {
    const int64_t begin = next.fetch_add(x.room, std::memory_order_relaxed);
    if (begin >= x.bytes) return cudaSuccess;
    const int64_t piece = thread * kTurns + turn % kTurns, bytes = std::min(x.room, x.bytes - begin);
    uint8_t* room = x.rooms + piece * x.room;
    cudaError_t error = cudaEventSynchronize(x.left[piece]);
    if (error != cudaSuccess) return error;
    std::memcpy(room, x.source + begin, static_cast<size_t>(bytes));
    error = cudaMemcpyAsync(x.to + begin, room, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, x.stream);
    if (error == cudaSuccess) error = cudaEventRecord(x.left[piece], x.stream);
    if (error != cudaSuccess) return error;
  }
}

bool is_bytes(const Tensor& x) {
  return x.scalar_type() == ScalarType::Byte && x.dim() == 1 && x.is_contiguous();
}

void send_bytes_(Tensor to, Tensor source, Tensor rooms, Tensor left) {
  STD_TORCH_CHECK(
      is_bytes(to) && is_bytes(source) && !source.is_cuda() && to.numel() == source.numel(),
      "late_interaction: to and source must be contiguous uint8 [n], of one n, source on the CPU");
  STD_TORCH_CHECK(rooms.scalar_type() == ScalarType::Byte && rooms.dim() == 2 && rooms.is_contiguous() &&
                      !rooms.is_cuda() && rooms.size(0) >= kTurns && rooms.size(0) % kTurns == 0 &&
                      rooms.size(1) > 0,
                  "late_interaction: rooms must be contiguous uint8 [pieces, bytes] in pinned memory");
  STD_TORCH_CHECK(left.scalar_type() == ScalarType::Long && left.dim() == 1 && left.is_contiguous() &&
                      !left.is_cuda() && left.numel() == rooms.size(0),
                  "late_interaction: left must be int64 [pieces], the handles of their events");
  static_assert(sizeof(cudaEvent_t) == sizeof(int64_t));
  const int device = to.get_device_index();
  const Transfer transfer{static_cast<uint8_t*>(to.data_ptr()),
                          static_cast<const uint8_t*>(source.const_data_ptr()),
                          source.numel(),
                          static_cast<uint8_t*>(rooms.data_ptr()),
                          rooms.size(1),
                          static_cast<const cudaEvent_t*>(left.const_data_ptr()),
                          current_stream(device)};
  std::atomic<int64_t> next{0};
  std::atomic<int> failed{cudaSuccess};
  const int64_t pieces = (transfer.bytes + transfer.room - 1) / transfer.room;
  const int64_t threads = std::min(pieces, rooms.size(0) / kTurns);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const DeviceGuard guard(device);
    for (int64_t thread = begin; thread < end; ++thread) {
      const cudaError_t error = send_pieces(transfer, thread, next);
      if (error != cudaSuccess) failed = error;
    }
  });
  check(static_cast<cudaError_t>(failed.load()), "transfer to the device");
}

}  // namespace

}  // namespace late_interaction

STABLE_TORCH_LIBRARY_IMPL(late_interaction, CUDA, m) {
  m.impl("send_bytes_", TORCH_BOX(&late_interaction::send_bytes_));
}
