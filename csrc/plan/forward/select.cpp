#include "select.h"

#include <algorithm>
#include <cstring>

#include "tiles.h"

namespace late_interaction {

namespace {

// By name, so that no plan depends on the order in which files are linked.
std::vector<const ForwardKernel*>& kernels() {
  static std::vector<const ForwardKernel*> all;
  return all;
}

std::vector<ForwardRules>& rules() {
  static std::vector<ForwardRules> all;
  return all;
}

std::vector<ForwardPlan> all_plans(const Sizes& s, const ForwardTraits& traits, const Device& device) {
  std::vector<ForwardPlan> plans;
  for (const ForwardKernel* kernel : kernels()) {
    const bool knows_scales = kernel->scales_documents || !traits.given_scales || is_quantized(traits.dtype);
    if (kernel->two_terms == traits.two_terms && knows_scales) kernel->enumerate(s, traits, device, plans);
  }
  return plans;
}

// By the rules of the device, or else the plan of the lowest cost.
std::optional<ForwardPlan> choose(const Sizes& s, const ForwardTraits& traits, const Device& device) {
  for (const ForwardRules each : rules()) {
    if (auto plan = each(s, traits, device)) return plan;
  }
  std::optional<ForwardPlan> best;
  double least = 0.0;
  for (const ForwardPlan& plan : all_plans(s, traits, device)) {
    if (plan.kernel->cost == nullptr) continue;
    const std::optional<double> cost = plan.kernel->cost(s, traits, plan, device);
    if (!cost || (best && *cost >= least)) continue;
    best = plan;
    least = *cost;
  }
  return best;
}

ForwardText dequantized_text(const Sizes& s, const ForwardPlan& plan) {
  return {.why = "no kernel multiplies " + name_of(plan.compute) + " codes of this d on this device; " +
                 rows_meet(s)};
}

}  // namespace

const ForwardKernel dequantized{.name = "dequantized",
                                .enumerate = nullptr,
                                .short_name = [](const ForwardPlan&) { return std::string("copies"); },
                                .text = dequantized_text};

RegisteredKernel::RegisteredKernel(const ForwardKernel& kernel) {
  if (kernel.enumerate == nullptr) return;
  const auto before = [](const ForwardKernel* a, const ForwardKernel* b) {
    return std::strcmp(a->name, b->name) < 0;
  };
  kernels().insert(std::upper_bound(kernels().begin(), kernels().end(), &kernel, before), &kernel);
}

RegisteredRules::RegisteredRules(ForwardRules each) { rules().push_back(each); }

ForwardPlan plan_forward(const Sizes& s, const ForwardTraits& traits, const Device& device) {
  if (const auto plan = choose(s, traits, device)) return *plan;
  ForwardPlan plan;
  plan.kernel = &dequantized;
  plan.compute = compute_for(traits.dtype, traits.precision);
  return plan;
}

std::optional<ForwardPlan> plan_3xfp16(const Sizes& s, bool masked, bool scaled, const Device& device) {
  // Kernels of two terms have room for scales.
  const ForwardTraits traits{.dtype = Dtype::fp16, .masked = masked, .scaled = true, .two_terms = true};
  std::optional<ForwardPlan> plan = choose(s, traits, device);
  if (plan) plan->scaled = plan->scaled && scaled;
  return plan;
}

std::vector<ForwardPlan> forward_alternatives(const Sizes& s, const ForwardTraits& traits,
                                              const Device& device) {
  std::vector<ForwardPlan> plans{plan_forward(s, traits, device)};
  for (const ForwardPlan& plan : all_plans(s, traits, device)) {
    const auto same = [&](const ForwardPlan& other) { return short_name(other) == short_name(plan); };
    if (std::none_of(plans.begin(), plans.end(), same)) plans.push_back(plan);
  }
  return plans;
}

std::string short_name(const ForwardPlan& plan) { return plan.kernel->short_name(plan); }

ForwardPlan adapted(const ForwardPlan& plan, const Sizes& s, const ForwardTraits& traits,
                    const Device& device, bool winners, bool listed) {
  return plan.kernel->adapt == nullptr ? plan : plan.kernel->adapt(plan, s, traits, device, winners, listed);
}

}  // namespace late_interaction
