// The forms of an operator: of scores alone, or with winners; with weights of query tokens, or without. A
// device computes all of them by one function, and the schemas in csrc/ops.cpp differ by these arguments
// alone.
#pragma once

#include <type_traits>

#include "plaid_tensors.h"
#include "registration.h"
#include "tensors.h"

namespace late_interaction {

// Winners have no value where they were not asked for.
using ScoresAndWinners = std::tuple<Tensor, OptionalTensor>;

struct Gradients {
  Tensor Q, D;  // without elements where they were not asked for
  OptionalTensor weights = std::nullopt;
};

namespace forms {

template <class T>
using Value = std::remove_cvref_t<T>;

// Room for winners has a size: where they are asked for, a number that is else optional must be given.
template <class T>
using GivenValue = std::conditional_t<std::is_same_v<Value<T>, std::optional<int64_t>>, int64_t, Value<T>>;

}  // namespace forms

// kScore(Q, D, weights or null, whether winners are wanted, further arguments).
template <auto kScore>
struct ScoreForms;

template <class... Rest,
          ScoresAndWinners (*kScore)(const Tensor&, const Tensor&, const Tensor*, bool, Rest...)>
struct ScoreForms<kScore> {
  static Tensor scores(Tensor Q, Tensor D, forms::Value<Rest>... rest) {
    return std::get<0>(kScore(Q, D, nullptr, false, rest...));
  }
  static Tensor weighted(Tensor Q, Tensor D, Tensor q_weights, forms::Value<Rest>... rest) {
    return std::get<0>(kScore(Q, D, &q_weights, false, rest...));
  }
  static std::tuple<Tensor, Tensor> winners(Tensor Q, Tensor D, forms::GivenValue<Rest>... rest) {
    auto [scores, winners] = kScore(Q, D, nullptr, true, rest...);
    return {scores, *winners};
  }
  static std::tuple<Tensor, Tensor> weighted_winners(Tensor Q, Tensor D, Tensor q_weights,
                                                     forms::GivenValue<Rest>... rest) {
    auto [scores, winners] = kScore(Q, D, &q_weights, true, rest...);
    return {scores, *winners};
  }

  // Registers `name`, name_winners, name_weighted and name_weighted_winners.
  static void add_to(torch::stable::detail::StableLibrary& m, const std::string& name) {
    m.impl(name.c_str(), TORCH_BOX(&scores));
    m.impl((name + "_winners").c_str(), TORCH_BOX(&winners));
    m.impl((name + "_weighted").c_str(), TORCH_BOX(&weighted));
    m.impl((name + "_weighted_winners").c_str(), TORCH_BOX(&weighted_winners));
  }
};

// kGradients(grad_scores, Q, D, weights or null, further arguments).
template <auto kGradients>
struct GradientForms;

template <class... Rest,
          Gradients (*kGradients)(const Tensor&, const Tensor&, const Tensor&, const Tensor*, Rest...)>
struct GradientForms<kGradients> {
  static std::tuple<Tensor, Tensor> plain(Tensor grad_scores, Tensor Q, Tensor D,
                                          forms::Value<Rest>... rest) {
    const Gradients grads = kGradients(grad_scores, Q, D, nullptr, rest...);
    return {grads.Q, grads.D};
  }
  static std::tuple<Tensor, Tensor, Tensor> weighted(Tensor grad_scores, Tensor Q, Tensor D, Tensor q_weights,
                                                     forms::Value<Rest>... rest) {
    const Gradients grads = kGradients(grad_scores, Q, D, &q_weights, rest...);
    return {grads.Q, grads.D, *grads.weights};
  }

  // Registers name_backward and name_weighted_backward.
  static void add_to(torch::stable::detail::StableLibrary& m, const std::string& name) {
    m.impl((name + "_backward").c_str(), TORCH_BOX(&plain));
    m.impl((name + "_weighted_backward").c_str(), TORCH_BOX(&weighted));
  }
};

// The forms of operators on residual-compressed documents. kScore(tensors, normalize, precision, whether
// winners are wanted), kGradient(grad_scores, tensors, winners, normalize).
template <ScoresAndWinners (*kScore)(const ResidualTensors&, bool, const std::string&, bool),
          Tensor (*kGradient)(const Tensor&, const ResidualTensors&, const Tensor&, bool)>
struct ResidualForms {
  // The parameters are those of the schemas.
  static Tensor scores(Tensor Q, Tensor codes, Tensor residuals, Tensor extents, Tensor centroids,
                       Tensor bucket_weights, int64_t nbits, bool normalize, std::string precision) {
    return std::get<0>(kScore({Q, codes, residuals, extents, centroids, bucket_weights, nbits}, normalize,
                              precision, false));
  }
  // The same.
  static std::tuple<Tensor, Tensor> winners(Tensor Q, Tensor codes, Tensor residuals, Tensor extents,
                                            Tensor centroids, Tensor bucket_weights, int64_t nbits,
                                            bool normalize, std::string precision) {
    auto [scores, winners] =
        kScore({Q, codes, residuals, extents, centroids, bucket_weights, nbits}, normalize, precision, true);
    return {scores, *winners};
  }
  // The same.
  static Tensor backward(Tensor grad_scores, Tensor Q, Tensor codes, Tensor residuals, Tensor extents,
                         Tensor centroids, Tensor bucket_weights, Tensor winners, int64_t nbits,
                         bool normalize) {
    return kGradient(grad_scores, {Q, codes, residuals, extents, centroids, bucket_weights, nbits}, winners,
                     normalize);
  }

  static void add_to(torch::stable::detail::StableLibrary& m) {
    m.impl("maxsim_residual", TORCH_BOX(&scores));
    m.impl("maxsim_residual_winners", TORCH_BOX(&winners));
    m.impl("maxsim_residual_backward", TORCH_BOX(&backward));
  }
};

}  // namespace late_interaction
