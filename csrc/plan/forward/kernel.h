// A forward kernel as the planner knows it. The folder of each kernel (cuda/forward/<kernel>) ends in one
// such descriptor, which registers itself: a new kernel is a new folder.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../plan.h"

namespace late_interaction {

// The lines of explain_plan that tell one kernel from another.
struct ForwardText {
  std::string tile = {}, ring = {}, q = {}, why = {}, more = {};
};

struct ForwardKernel {
  const char* name;

  // Adds the plans by which the kernel could serve the call, whether they suit it or not: none where it
  // cannot. A plan of forced_plan is one of these.
  void (*enumerate)(const Sizes&, const ForwardTraits&, const Device&, std::vector<ForwardPlan>&);
  // Microseconds that such a plan takes; nothing where another rule of the planner decides.
  std::optional<double> (*cost)(const Sizes&, const ForwardTraits&, const ForwardPlan&, const Device&);
  // What tells a plan from the others: "rows 152 copied" (forward/select.h).
  std::string (*short_name)(const ForwardPlan&);
  ForwardText (*text)(const Sizes&, const ForwardPlan&);

  bool two_terms = false;          // multiplies operands of ForwardTraits::two_terms
  bool finds_norms = false;        // of whole documents itself, where rows are to be normalized
  bool scales_documents = false;   // takes a scale for each document token
  bool takes_fp16_copies = false;  // of rows that are converted before, with scales where it knows them
  bool takes_shares = false;       // packed or listed: of work tiles that take about as long together
  bool takes_slots = false;        // packed: documents as slots of a tile
  // Where a call's winners or listed pairs need other numbers than the plan for scores alone has.
  ForwardPlan (*adapt)(const ForwardPlan&, const Sizes&, const ForwardTraits&, const Device&, bool winners,
                       bool listed) = nullptr;
};

// Makes the planner ask a kernel; a variable of this type stands beside each descriptor.
struct RegisteredKernel {
  explicit RegisteredKernel(const ForwardKernel& kernel);
};

// The choice among a GPU's own kernels by rules that were measured on it, where it has any: nothing where
// they leave the call to the kernels' costs.
using ForwardRules = std::optional<ForwardPlan> (*)(const Sizes&, const ForwardTraits&, const Device&);
struct RegisteredRules {
  explicit RegisteredRules(ForwardRules rules);
};

}  // namespace late_interaction
