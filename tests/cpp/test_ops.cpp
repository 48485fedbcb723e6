// The operators from C++: found in the dispatcher, called with tensors, compared with plain ATen.
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "check.h"

namespace {

using OptionalTensor = std::optional<at::Tensor>;

std::tuple<at::Tensor, at::Tensor> maxsim_winners(const at::Tensor& Q, const at::Tensor& D,
                                                  const OptionalTensor& q_mask,
                                                  const OptionalTensor& d_mask) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("late_interaction::maxsim_winners", "")
                       .typed<std::tuple<at::Tensor, at::Tensor>(
                           const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                           bool, c10::string_view, c10::string_view, bool)>();
  return op.call(Q, D, q_mask, d_mask, /*normalize=*/false, /*precision=*/"highest", /*backward=*/"auto",
                 /*paired=*/false);
}

void test_scores_and_winners() {
  const at::Tensor Q = at::randn({3, 5, 16}), D = at::randn({4, 7, 16});
  const at::Tensor d_mask = at::ones({4, 7}, at::kBool);
  d_mask.select(0, 1).slice(0, 3).fill_(false);

  const auto [scores, winners] = maxsim_winners(Q, D, std::nullopt, d_mask);

  const at::Tensor sim =
      at::einsum("isk,jtk->ijst", {Q, D})
          .masked_fill(d_mask.logical_not().view({1, 4, 1, 7}), -std::numeric_limits<float>::infinity());
  const auto [best, token] = sim.max(-1);
  EXPECT(at::allclose(scores, best.sum(-1), 1e-5, 1e-5));
  EXPECT(at::equal(winners.to(at::kLong), token));
}

void test_a_document_without_tokens_scores_zero() {
  const at::Tensor Q = at::randn({2, 3, 8}), D = at::randn({2, 4, 8});
  const auto [scores, winners] = maxsim_winners(Q, D, std::nullopt, at::zeros({2, 4}, at::kBool));
  EXPECT(scores.abs().max().item<float>() == 0.0f);
  EXPECT(winners.eq(-1).all().item<bool>());
}

void test_quantized_tokens() {
  const at::Tensor Q = at::randint(-9, 10, {3, 5, 16}, at::kChar),
                   D = at::randint(-9, 10, {4, 7, 16}, at::kChar);
  const at::Tensor scale_Q = at::rand({3, 5}), scale_D = at::rand({4, 7});
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("late_interaction::maxsim_quantized", "")
                       .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                         const at::Tensor&, const OptionalTensor&, const OptionalTensor&)>();
  const at::Tensor scores = op.call(Q, D, scale_Q, scale_D, std::nullopt, std::nullopt);

  const at::Tensor q = Q.to(at::kFloat) * scale_Q.unsqueeze(-1), d = D.to(at::kFloat) * scale_D.unsqueeze(-1);
  const at::Tensor best = std::get<0>(at::einsum("isk,jtk->ijst", {q, d}).max(-1));
  EXPECT(at::allclose(scores, best.sum(-1), 1e-5, 1e-4));
}

void test_a_wrong_shape_is_an_exception() {
  std::string message;
  try {
    maxsim_winners(at::randn({2, 3, 8}), at::randn({2, 4, 9}), std::nullopt, std::nullopt);
  } catch (const std::exception& error) {
    message = error.what();
  }
  EXPECT(message.find("Q and D must share d") != std::string::npos);
}

}  // namespace

int main() {
  test_scores_and_winners();
  test_a_document_without_tokens_scores_zero();
  test_quantized_tokens();
  test_a_wrong_shape_is_an_exception();
  return failures != 0;
}
