// Work items over PyTorch's own thread pool. Threads take the next item from a counter, so uneven items
// (masks, a busy core) even out. What an item computes never depends on who runs it.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "scratch.h"

namespace late_interaction::cpu {

// Below this many multiply-adds a call is over before a second thread has woken up.
inline constexpr double kSerialWork = 1e6;

inline int64_t threads_for(double multiply_adds) {
  return multiply_adds < kSerialWork ? 1 : static_cast<int64_t>(torch::stable::get_num_threads());
}

// make() builds a worker once per thread; worker(item) runs for every item in [0, items).
template <class Make>
void for_each_item(int64_t items, int64_t threads, const Make& make) {
  std::atomic<int64_t> next{0};
  const auto run = [&](int64_t, int64_t) {
    {
      auto worker = make();
      for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) worker(item);
    }
    thread_scratch().trim();
  };
  threads = std::min(threads, items);
  if (threads <= 1) {
    run(0, 1);
  } else {
    torch::stable::parallel_for(0, threads, 1, run);
  }
}

}  // namespace late_interaction::cpu
