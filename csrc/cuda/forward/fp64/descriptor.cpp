#include "../../../plan/forward/kernel.h"

namespace late_interaction {

extern const ForwardKernel fp64;

namespace {

// One block for each (query, document): the reference path, exact and unhurried.
void enumerate(const Sizes& s, const ForwardTraits& traits, const Device&, std::vector<ForwardPlan>& plans) {
  if (traits.dtype != Dtype::fp64) return;
  ForwardPlan plan;
  plan.kernel = &fp64;
  plan.compute = Compute::fp64;
  plan.work_tiles = plan.grid = s.Nq * s.N;
  plans.push_back(plan);
}

std::optional<double> cost(const Sizes&, const ForwardTraits&, const ForwardPlan&, const Device&) {
  return 0.0;  // it is the only one
}

std::string short_name(const ForwardPlan&) { return "none"; }

ForwardText text(const Sizes&, const ForwardPlan&) {
  return {.why = "float64 products, which no tile of the tensor cores serves"};
}

}  // namespace

const ForwardKernel fp64{.name = "fp64",
                         .enumerate = enumerate,
                         .cost = cost,
                         .short_name = short_name,
                         .text = text,
                         .finds_norms = true};

}  // namespace late_interaction
