// A kernel for a new GPU is a new folder: linked into the planner, sm100_stub is planned, listed and
// explained, and no other file knows it.
#include "../../csrc/plan/forward/select.h"
#include "../../csrc/plan/pairs.h"

#include <algorithm>

#include "check.h"

using namespace late_interaction;

namespace {

const Device kNew = device_of_capability(100, 148), kHopper = device_of_capability(90, 132);
const Sizes kFull{Layout::in_batch, 256, 256, 32, 300, 128},
    kOneQuery{Layout::in_batch, 1, 1000, 32, 300, 128};

std::string name(const Sizes& s, const ForwardTraits& traits, const Device& device) {
  return plan_forward(s, traits, device).kernel->name;
}

bool lists_it(const Sizes& s, const Device& device) {
  const auto plans = forward_alternatives(s, {}, device);
  return std::any_of(plans.begin(), plans.end(), [](const auto& plan) { return short_name(plan) == "stub"; });
}

void test_it_is_chosen_where_it_is_sooner() {
  EXPECT(name(kFull, {}, kNew) == "sm100_stub");
  EXPECT(name(kOneQuery, {}, kNew) != "sm100_stub");
  EXPECT(name(kFull, {.dtype = Dtype::fp32}, kNew) != "sm100_stub");
  EXPECT(name(kFull, {}, kHopper) == "sm90_q");
}

void test_it_is_listed_and_explained() {
  EXPECT(lists_it(kFull, kNew) && lists_it(kOneQuery, kNew) && !lists_it(kFull, kHopper));
  const std::string text = explain(kFull, plan_forward(kFull, {}, kNew));
  EXPECT(text.find("maxsim_forward_sm100_stub") != std::string::npos &&
         text.find("tcgen05") != std::string::npos);
}

void test_listed_pairs_may_have_it() {
  const ForwardPlan plan = plan_pairs({5000, 64, 64, 64 * 512, 64 * 300, 128, 512}, {}, false, kNew);
  EXPECT(plan.kernel->takes_shares && plan.work_tiles == 5000);
}

}  // namespace

int main() {
  test_it_is_chosen_where_it_is_sooner();
  test_it_is_listed_and_explained();
  test_listed_pairs_may_have_it();
  return failures != 0;
}
