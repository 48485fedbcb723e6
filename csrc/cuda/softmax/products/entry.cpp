// The CUDA side of softmax_product_rows_: parse, workspace, launch. Nothing here waits for the device.
#include <cuda_runtime.h>

#include "../../../common/arithmetic.h"
#include "../../../common/registration.h"
#include "../../../common/tensors.h"
#include "../../runtime/op_helpers.h"
#include "args.h"

namespace late_interaction {

namespace {

constexpr int64_t kSumRows = 6;

// TMA and vector loads can read it.
bool is_readable(const Tensor& x) {
  return x.scalar_type() == ScalarType::BFloat16 && fits_tensor_map(x) && x.numel() > 0 &&
         x.size(0) <= kMaxTokens && x.stride(0) >= x.size(1);
}

bool can_softmax_product_rows(Tensor Q, Tensor D) {
  return is_readable(Q) && is_readable(D) && same_place(Q, D) && Q.size(1) == D.size(1) &&
         can_product_rows(device_properties(Q.get_device_index()), Q.size(1));
}

ProductRowsArgs parse(const Tensor& Q, const Tensor& D, const Tensor& inverse_temperature,
                      const OptionalTensor& labels, int64_t first, const Tensor& factor) {
  STD_TORCH_CHECK(can_softmax_product_rows(Q, D),
                  "late_interaction: can_softmax_product_rows says no to these Q and D");
  STD_TORCH_CHECK(inverse_temperature.numel() == 1 &&
                      inverse_temperature.scalar_type() == ScalarType::Float &&
                      same_place(inverse_temperature, Q),
                  "late_interaction: inverse_temperature must be one float32 on the device of Q");
  if (labels) check_dense(*labels, ScalarType::Long, {Q.size(0)}, "labels", Q);
  check_dense(factor, ScalarType::Float, {Q.size(0)}, "factor", Q);
  ProductRowsArgs args{};
  args.q = data_of<__nv_bfloat16>(Q);
  args.documents = data_of<__nv_bfloat16>(D);
  args.q_stride = Q.stride(0);
  args.document_stride = D.stride(0);
  args.rows = static_cast<int32_t>(Q.size(0));
  args.columns = static_cast<int32_t>(D.size(0));
  args.d = static_cast<int32_t>(Q.size(1));
  args.inverse_temperature = data_of<float>(inverse_temperature);
  args.labels = {data_of<int64_t>(labels), first};
  args.factor = data_of<float>(factor);
  return args;
}

void parse_outputs(ProductRowsArgs& args, const Tensor& Q, const Tensor& D, const Tensor& weights,
                   const OptionalTensor& scaled_Q) {
  STD_TORCH_CHECK(has_shape(weights, {Q.size(0), D.size(0)}) && same_place(weights, Q) &&
                      weights.scalar_type() == ScalarType::BFloat16 && weights.stride(1) == 1 &&
                      weights.stride(0) % 8 == 0 && weights.stride(0) >= D.size(0) &&
                      is_aligned(weights.const_data_ptr(), 16),
                  "late_interaction: weights must be bfloat16 [rows, columns] on the device of Q, of "
                  "contiguous rows that begin at multiples of 16 bytes");
  STD_TORCH_CHECK(!scaled_Q || (has_shape(*scaled_Q, {Q.size(0), Q.size(1)}) && same_place(*scaled_Q, Q) &&
                                scaled_Q->scalar_type() == ScalarType::BFloat16 &&
                                scaled_Q->is_contiguous() && is_aligned(scaled_Q->const_data_ptr(), 16)),
                  "late_interaction: scaled_Q must be a contiguous bfloat16 tensor of the shape of Q, "
                  "aligned to 16 bytes, on its device");
  args.weights = mutable_data_of<__nv_bfloat16>(weights);
  args.weight_stride = weights.stride(0);
  args.scaled_q = scaled_Q ? mutable_data_of<__nv_bfloat16>(*scaled_Q) : nullptr;
}

Tensor softmax_product_rows_(Tensor Q, Tensor D, Tensor inverse_temperature, OptionalTensor labels,
                             int64_t first, Tensor factor, Tensor weights, OptionalTensor scaled_Q) {
  ProductRowsArgs args = parse(Q, D, inverse_temperature, labels, first, factor);
  parse_outputs(args, Q, D, weights, scaled_Q);
  const OnDevice on(Q);
  const ProductRowsPlan plan = plan_product_rows(on.properties(), args.rows, args.columns, args.d);
  args.tile_rows = plan.tile_rows;
  args.shares = plan.shares;
  args.most_owners = plan.most_owners;
  const Tensor sums = new_tensor(Q, {kSumRows, args.rows}, ScalarType::Float);
  // Two bases, the label's score and three partial sums of each owner for every row; and the flag.
  const Tensor workspace =
      new_tensor(Q, {(int64_t{3} + 3 * plan.most_owners) * args.rows + 1}, ScalarType::Float);
  args.sums = mutable_data_of<float>(sums);
  auto* space = mutable_data_of<float>(workspace);
  args.overflow = reinterpret_cast<int32_t*>(space);
  args.base[0] = space + 1;
  args.base[1] = args.base[0] + args.rows;
  args.label_scores = args.base[1] + args.rows;
  args.partials = args.label_scores + args.rows;
  check(launch_product_rows(args, on.stream()), "softmax of a product");
  return sums;
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("can_softmax_product_rows", TORCH_BOX(&late_interaction::can_softmax_product_rows));
  m.impl("softmax_product_rows_", TORCH_BOX(&late_interaction::softmax_product_rows_));
}
