// Pageable host memory to the device by way of a ring of pinned staging slots:
//
//   source   |....|....|....|....|....|....|     blocks, to whichever thread is free, in order
//               v    v    v    v                 copied
//   ring     [ slot 0  | slot 1  | slot 2  ]     sent whole, by the thread that filled the last of it
//               v                                one transfer, then an event: it has left
//   to       |.........|                         and the slot is filled again
//
// Slots are large, since the bus idles between two transfers. All threads fill one slot before the next, so
// that the bus starts early and a few slots are enough, which stay in the CPU's cache until they are read. A
// call continues where the last one ended, so the ring never has to drain.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../runtime/check.h"
#include "../runtime/stream.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;

constexpr int64_t kBlock = 512 << 10;

struct Ring {
  uint8_t* memory;
  int64_t slots;
  int64_t slot_bytes;         // bytes of a slot
  const cudaEvent_t* events;  // of each slot: its transfer has ended
  int64_t first;              // the slot that is filled first
};

class Transfer {
 public:
  Transfer(uint8_t* to, const uint8_t* source, int64_t bytes, const Ring& ring, cudaStream_t stream)
      : to_(to),
        source_(source),
        bytes_(bytes),
        ring_(ring),
        stream_(stream),
        blocks_a_slot_((ring.slot_bytes + kBlock - 1) / kBlock),
        turns_((bytes + ring.slot_bytes - 1) / ring.slot_bytes) {}

  // A thread's share: blocks until none is left. Any number of threads, one after another too.
  void work() {
    for (int64_t block; error() == cudaSuccess && (block = next_.fetch_add(1)) < blocks();) {
      const int64_t turn = block / blocks_a_slot_, offset = block % blocks_a_slot_ * kBlock;
      const int64_t begin = turn * ring_.slot_bytes + offset;
      const int64_t end = std::min({begin + kBlock, (turn + 1) * ring_.slot_bytes, bytes_});
      if (!wait_for_slot(turn)) return;
      // The last slot may end before its last block begins.
      if (begin < end)
        std::memcpy(staging_slot(turn) + offset, source_ + begin, static_cast<size_t>(end - begin));
      if (++turns_[turn].filled == blocks_a_slot_) send(turn);
    }
  }

  int64_t blocks() const { return static_cast<int64_t>(turns_.size()) * blocks_a_slot_; }
  cudaError_t error() const { return static_cast<cudaError_t>(error_.load(std::memory_order_relaxed)); }

 private:
  struct Turn {  // of a slot
    std::atomic<int64_t> filled{0};
    std::atomic<bool> sent{false};
  };

  int64_t slot(int64_t turn) const { return (ring_.first + turn) % ring_.slots; }
  uint8_t* staging_slot(int64_t turn) const { return ring_.memory + slot(turn) * ring_.slot_bytes; }

  // Blocks are taken in order, so a slot that is waited for is being filled and sent, and waits for no later
  // one.
  bool wait_for_slot(int64_t turn) {
    const int64_t before = turn - ring_.slots;
    while (before >= 0 && !turns_[before].sent.load(std::memory_order_acquire)) {
      if (error() != cudaSuccess) return false;
      std::this_thread::yield();
    }
    return succeeds(cudaEventSynchronize(ring_.events[slot(turn)]));
  }

  void send(int64_t turn) {
    const int64_t begin = turn * ring_.slot_bytes, bytes = std::min(ring_.slot_bytes, bytes_ - begin);
    if (succeeds(cudaMemcpyAsync(to_ + begin, staging_slot(turn), static_cast<size_t>(bytes),
                                 cudaMemcpyHostToDevice, stream_)) &&
        succeeds(cudaEventRecord(ring_.events[slot(turn)], stream_))) {
      turns_[turn].sent.store(true, std::memory_order_release);
    }
  }

  bool succeeds(cudaError_t error) {
    if (error != cudaSuccess) error_ = error;
    return error == cudaSuccess;
  }

  uint8_t* to_;
  const uint8_t* source_;
  int64_t bytes_;
  Ring ring_;
  cudaStream_t stream_;
  int64_t blocks_a_slot_;
  std::vector<Turn> turns_;
  std::atomic<int64_t> next_{0};
  std::atomic<int> error_{cudaSuccess};
};

bool is_bytes(const Tensor& x) {
  return x.scalar_type() == ScalarType::Byte && x.dim() == 1 && x.is_contiguous();
}

void send_bytes_(Tensor to, Tensor source, Tensor staging, Tensor events, int64_t first) {
  STD_TORCH_CHECK(
      is_bytes(to) && is_bytes(source) && !source.is_cuda() && to.numel() == source.numel(),
      "late_interaction: to and source must be contiguous uint8 [n], of one n, source on the CPU");
  STD_TORCH_CHECK(staging.scalar_type() == ScalarType::Byte && staging.dim() == 2 &&
                      staging.is_contiguous() && !staging.is_cuda() && staging.numel() > 0,
                  "late_interaction: staging must be contiguous uint8 [slots, bytes] in pinned memory");
  STD_TORCH_CHECK(events.scalar_type() == ScalarType::Long && events.dim() == 1 && events.is_contiguous() &&
                      !events.is_cuda() && events.numel() == staging.size(0),
                  "late_interaction: events must be int64 [slots], the handle of each slot's event");
  STD_TORCH_CHECK(first >= 0 && first < staging.size(0), "late_interaction: first must be one of the ",
                  staging.size(0), " slots, got ", first);
  static_assert(sizeof(cudaEvent_t) == sizeof(int64_t));
  const int device = to.get_device_index();
  const Ring ring{static_cast<uint8_t*>(staging.data_ptr()), staging.size(0), staging.size(1),
                  static_cast<const cudaEvent_t*>(events.const_data_ptr()), first};
  Transfer transfer(static_cast<uint8_t*>(to.data_ptr()),
                    static_cast<const uint8_t*>(source.const_data_ptr()), source.numel(), ring,
                    current_stream(device));
  torch::stable::parallel_for(0, std::min<int64_t>(transfer.blocks(), torch::stable::get_num_threads()), 1,
                              [&](int64_t, int64_t) {
                                const DeviceGuard guard(device);
                                transfer.work();
                              });
  check(transfer.error(), "transfer to the device");
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) { m.impl("send_bytes_", TORCH_BOX(&late_interaction::send_bytes_)); }
