#include "plan_override.h"

#include <torch/headeronly/util/Exception.h>

#include <atomic>
#include <mutex>
#include <set>

#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../../plan/forward/select.h"

namespace late_interaction {

namespace {

std::atomic<const std::string*> forced{nullptr};

// Stays where it is for the life of the process: another thread may be reading it.
const std::string* keep(const std::string& name) {
  static std::mutex mutex;
  static std::set<std::string> names;
  const std::lock_guard lock(mutex);
  return &*names.insert(name).first;
}

}  // namespace

ForwardPlan chosen_plan(const Sizes& sizes, const ForwardTraits& traits, bool winners, const Device& device) {
  const std::string* name = forced.load(std::memory_order_acquire);
  const auto left = [&](const ForwardPlan& plan) {
    return adapted(plan, sizes, traits, device, winners, false);
  };
  if (name == nullptr) return left(plan_forward(sizes, traits, device));
  std::string others;
  for (const ForwardPlan& plan : forward_alternatives(sizes, traits, device)) {
    if (short_name(plan) == *name) return left(plan);
    others += (others.empty() ? "" : ", ") + short_name(plan);
  }
  STD_TORCH_CHECK(false, "late_interaction: this call cannot have the plan ", in_quotes(*name), ", only ",
                  others);
}

std::string forced_plan(std::optional<std::string> force) {
  if (force) forced.store(force->empty() ? nullptr : keep(*force), std::memory_order_release);
  const std::string* name = forced.load(std::memory_order_acquire);
  return name == nullptr ? "" : *name;
}

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("forced_plan", TORCH_BOX(&late_interaction::forced_plan));
}
