// MUVERA's fixed dimensional encodings on the CPU, a sequence at a time, each by one thread:
//
//   tokens   those that count, as float32 [n, d]
//   signs    bits [n, repetitions * k_sim]: on which side of each hyperplane a token lies
//   then for each repetition:
//     sums       [2^k_sim, d], of the tokens whose k_sim bits are the partition's number, in their order
//     filled     empty partitions take the token that is nearest in Hamming distance, the lowest of several
//     projected  [2^k_sim, d_proj], where there is a projection
//     stored     as the repetition's block of the encoding, or added to the buckets of the count sketch
#include "../common/muvera_tensors.h"

#include <bit>
#include <cstring>
#include <limits>
#include <string>

#include "../common/arithmetic.h"
#include "../common/registration.h"
#include "kernels.h"
#include "op_helpers.h"
#include "parallel.h"

namespace late_interaction::cpu {
namespace {

class Encoder {
 public:
  explicit Encoder(const MuveraCall& call)
      : call_(call),
        kernels_(kernels()),
        rows_(kernels_.muvera),
        partitions_(call.partitions()),
        columns_(round_up(call.repetitions * call.k_sim, kMuveraColumns)),
        projected_columns_(round_up(call.d_proj, kMuveraColumns)) {}

  void operator()(int64_t sequence) {
    float* encoding = call_.encodings + sequence * call_.dim();
    std::memset(encoding, 0, call_.dim() * sizeof(float));
    take_scratch(sequence);
    if (!read_tokens(sequence)) {
      std::fill_n(encoding, call_.dim(), std::numeric_limits<float>::quiet_NaN());
      return;
    }
    if (count_ == 0) return;
    if (columns_ > 0) rows_.signs(tokens_, count_, call_.hyperplanes, columns_, call_.d, bits_);
    for (int64_t r = 0; r < call_.repetitions; ++r) encode_block(r, encoding);
  }

 private:
  int64_t length_of(int64_t sequence) const {
    if (call_.offsets == nullptr) return call_.length;
    return call_.offsets[sequence + 1] - call_.offsets[sequence];
  }

  void take_scratch(int64_t sequence) {
    const int64_t n = length_of(sequence), bit_bytes = n * (columns_ / 8) + 8;  // 8: reads past the end
    thread_scratch().start(Array{n * call_.d, tokens_}, Array{bit_bytes, bits_},
                           Array{partitions_ * call_.d, block_},
                           Array{partitions_ * projected_columns_, projected_}, Array{partitions_, sizes_},
                           Array{partitions_, first_}, Array{partitions_, nearest_});
  }

  // Reads the tokens that count, as float32. Returns false if one of them is not finite.
  bool read_tokens(int64_t sequence) {
    const TokenView& x = call_.tokens;
    const int64_t length = length_of(sequence), element = element_bytes(call_.dtype);
    const char* data = static_cast<const char*>(x.data);
    data += element *
            (call_.offsets != nullptr ? call_.offsets[sequence] * x.token_stride : sequence * x.item_stride);
    const MaskView& mask = call_.mask;
    const uint8_t* kept = mask.data == nullptr ? nullptr : mask.data + sequence * mask.item_stride;
    count_ = 0;
    for (int64_t t = 0; t < length; ++t) {
      if (kept != nullptr && kept[t * mask.token_stride] == 0) continue;
      widen(data + t * element * x.token_stride, tokens_ + call_.d * count_++);
    }
    uint32_t not_finite = 0;
    for (int64_t i = 0; i < count_ * call_.d; ++i) {
      constexpr uint32_t kExponent = 0x7F800000;
      not_finite |= static_cast<uint32_t>((std::bit_cast<uint32_t>(tokens_[i]) & kExponent) == kExponent);
    }
    return not_finite == 0;
  }

  void widen(const char* token, float* out) const {
    const int64_t stride = call_.tokens.dim_stride;
    if (call_.dtype != Dtype::fp64) {
      kernels_.f32.pack_row(token, call_.dtype, stride, call_.d, out);
      return;
    }
    const auto* x = reinterpret_cast<const double*>(token);
    for (int64_t k = 0; k < call_.d; ++k) out[k] = static_cast<float>(x[k * stride]);
  }

  int64_t partition_of(int64_t token, int64_t repetition) const {
    const int64_t bit = repetition * call_.k_sim;
    uint32_t word;
    std::memcpy(&word, bits_ + token * (columns_ / 8) + bit / 8, sizeof word);
    return (word >> (bit % 8)) & (partitions_ - 1);
  }

  void encode_block(int64_t repetition, float* encoding) {
    const int64_t size = partitions_ * call_.d_block();
    const bool in_place = call_.projection == nullptr && call_.buckets == nullptr;
    float* block = in_place ? encoding + repetition * size : block_;
    if (!in_place) std::memset(block, 0, partitions_ * call_.d * sizeof(float));
    add_tokens(repetition, block);
    if (call_.average && call_.fill_empty) fill_empty(block);
    if (call_.projection != nullptr) block = project(repetition, block);
    if (call_.buckets != nullptr) {
      add_to_buckets(repetition * size, size, block, encoding);
    } else if (!in_place) {
      std::memcpy(encoding + repetition * size, block, size * sizeof(float));
    }
  }

  void add_tokens(int64_t repetition, float* block) {
    std::memset(sizes_, 0, partitions_ * sizeof(int32_t));
    for (int64_t t = 0; t < count_; ++t) {
      const int64_t p = partition_of(t, repetition);
      if (sizes_[p]++ == 0) first_[p] = static_cast<int32_t>(t);
      rows_.add(block + p * call_.d, tokens_ + t * call_.d, call_.d);
    }
    for (int64_t p = 0; p < partitions_; ++p) {
      if (sizes_[p] == 0) continue;
      const float factor = call_.average ? call_.scale / static_cast<float>(sizes_[p]) : call_.scale;
      if (factor != 1) rows_.scale(block + p * call_.d, factor, call_.d);
    }
  }

  // Finds the least (distance, token) of each partition. In a pass for each bit, partitions that differ in it
  // exchange their least, at a distance one larger: the distance transform of a hypercube, which is exact.
  void fill_empty(float* block) {
    constexpr uint64_t kFurther = uint64_t{1} << 32, kNone = uint64_t{1} << 62;
    for (int64_t p = 0; p < partitions_; ++p) {
      nearest_[p] = sizes_[p] > 0 ? static_cast<uint64_t>(first_[p]) : kNone;
    }
    for (int64_t bit = 1; bit < partitions_; bit *= 2) {
      for (int64_t p = 0; p < partitions_; ++p) {
        if ((p & bit) != 0) continue;
        const uint64_t a = nearest_[p], b = nearest_[p | bit];
        nearest_[p] = std::min(a, b + kFurther);
        nearest_[p | bit] = std::min(b, a + kFurther);
      }
    }
    for (int64_t p = 0; p < partitions_; ++p) {
      if (sizes_[p] > 0) continue;
      const int64_t token = static_cast<uint32_t>(nearest_[p]);
      std::memcpy(block + p * call_.d, tokens_ + token * call_.d, call_.d * sizeof(float));
      if (call_.scale != 1) rows_.scale(block + p * call_.d, call_.scale, call_.d);
    }
  }

  // [2^k_sim, d_proj], without the columns that fill up the matrix.
  float* project(int64_t repetition, const float* block) {
    const float* matrix = call_.projection + repetition * call_.d * projected_columns_;
    rows_.project(block, partitions_, matrix, projected_columns_, call_.d, projected_);
    if (projected_columns_ == call_.d_proj) return projected_;
    for (int64_t p = 1; p < partitions_; ++p) {
      std::memmove(projected_ + p * call_.d_proj, projected_ + p * projected_columns_,
                   call_.d_proj * sizeof(float));
    }
    return projected_;
  }

  void add_to_buckets(int64_t start, int64_t size, const float* block, float* encoding) const {
    const int32_t* buckets = call_.buckets + start;
    const float* signs = call_.signs + start;
    for (int64_t i = 0; i < size; ++i) encoding[buckets[i]] += signs[i] * block[i];
  }

  const MuveraCall& call_;
  const Kernels& kernels_;
  const MuveraRows& rows_;
  int64_t partitions_;
  int64_t columns_;            // of the hyperplanes
  int64_t projected_columns_;  // of a projection
  int64_t count_ = 0;          // tokens that count
  float* tokens_ = nullptr;
  uint8_t* bits_ = nullptr;
  float* block_ = nullptr;
  float* projected_ = nullptr;
  int32_t* sizes_ = nullptr;     // [partitions] tokens
  int32_t* first_ = nullptr;     // [partitions] the lowest token, if there is one
  uint64_t* nearest_ = nullptr;  // [partitions] distance << 32 | token
};

void encode(const MuveraCall& call) {
  const double tokens = call.offsets != nullptr
                            ? call.offsets[call.sequences]
                            : static_cast<double>(call.sequences) * static_cast<double>(call.length);
  const double blocks = static_cast<double>(call.sequences) * static_cast<double>(call.dims_before_sketch());
  const double columns = static_cast<double>(call.repetitions * (call.k_sim + 1));
  const double work = tokens * static_cast<double>(call.d) * columns + blocks;
  for_each_item(call.sequences, threads_for(work), [&] { return Encoder(call); });
}

// Checks indices, so that nothing is read or written outside of tensors.
void check_values(const MuveraCall& call) {
  if (call.offsets != nullptr) {
    check_offsets(call.offsets, call.sequences, call.packed_tokens, "cu_seqlens");
  }
  if (call.buckets == nullptr) return;
  bool fits = true;
  for (int64_t i = 0; i < call.dims_before_sketch(); ++i) {
    fits &= call.buckets[i] >= 0 && call.buckets[i] < call.d_final;
  }
  STD_TORCH_CHECK(fits, "late_interaction: buckets must lie in [0, ", call.d_final, ")");
}

Tensor muvera_encode(Tensor tokens, OptionalTensor mask, OptionalTensor cu_seqlens, Tensor hyperplanes,
                     OptionalTensor projection, OptionalTensor buckets, OptionalTensor signs, int64_t k_sim,
                     int64_t repetitions, int64_t d_proj, int64_t d_final, bool average, bool fill_empty,
                     double scale) {
  MuveraCall call = parse_muvera(tokens, mask, cu_seqlens, hyperplanes, projection, buckets, signs,
                                 {k_sim, repetitions, d_proj, d_final});
  check_values(call);
  call.average = average;
  call.fill_empty = fill_empty;
  call.scale = static_cast<float>(scale);
  Tensor encodings = new_tensor(tokens, {call.sequences, call.dim()}, ScalarType::Float);
  call.encodings = static_cast<float*>(encodings.mutable_data_ptr());
  encode(call);
  return encodings;
}

}  // namespace
}  // namespace late_interaction::cpu

LATE_INTERACTION_LIBRARY_IMPL(CPU, m) {
  m.impl("muvera_encode", TORCH_BOX(&late_interaction::cpu::muvera_encode));
}
