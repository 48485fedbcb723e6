// A thread's working memory: one aligned block, kept between calls while it is small, carved into
// arrays. Its size depends on the tile, never on the number of queries or documents.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace late_interaction::cpu {

// An array to be taken: how many elements, and the pointer that gets its address.
template <class T>
struct Array {
  int64_t count;
  T*& at;
};
template <class T>
Array(int64_t, T*&) -> Array<T>;

class Scratch {
 public:
  static constexpr size_t kAlign = 64;

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

  // Starts over with these arrays, and room for `more` bytes.
  template <class... T>
  void start(size_t more, Array<T>... arrays) {
    reset((size_of<T>(arrays.count) + ... + more));
    take(arrays...);
  }
  template <class... T>
  void start(Array<T>... arrays) {
    start(0, arrays...);
  }

  // The next arrays of the room that start() left.
  template <class... T>
  void take(Array<T>... arrays) {
    ((arrays.at = reinterpret_cast<T*>(data_ + used_), used_ += size_of<T>(arrays.count)), ...);
  }

  template <class T>
  static size_t size_of(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
  }

  // Call when done: frees memory that is too large to keep.
  void trim() {
    if (size_ > kKeep) release();
  }

 private:
  static constexpr size_t kKeep = size_t{4} << 20;

  // Arrays taken before are gone.
  void reset(size_t bytes) {
    if (bytes > size_) {
      release();
      data_ = static_cast<char*>(::operator new(bytes, std::align_val_t(kAlign)));
      size_ = bytes;
    }
    used_ = 0;
  }

  void release() {
    ::operator delete(data_, std::align_val_t(kAlign));
    data_ = nullptr;
    size_ = 0;
  }

  char* data_ = nullptr;
  size_t size_ = 0;
  size_t used_ = 0;
};

inline Scratch& thread_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

}  // namespace late_interaction::cpu
