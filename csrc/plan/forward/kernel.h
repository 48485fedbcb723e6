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

struct ForwardKernel;

// Makes the planner ask a kernel.
struct RegisteredKernel {
  explicit RegisteredKernel(const ForwardKernel& kernel);
};

struct ForwardKernel {
  const char* name;

  // Adds all plans by which the kernel can serve the call, good or bad; forced_plan names one of them. Null:
  // the planner never asks.
  void (*enumerate)(const Sizes&, const ForwardTraits&, const Device&, std::vector<ForwardPlan>&);
  // Estimated microseconds of such a plan; nothing where a GPU's rules decide. Null: they always do.
  std::optional<double> (*cost)(const Sizes&, const ForwardTraits&, const ForwardPlan&,
                                const Device&) = nullptr;
  // Distinguishes the kernel's plans: "rows 152 copied" (forward/select.h).
  std::string (*short_name)(const ForwardPlan&);
  ForwardText (*text)(const Sizes&, const ForwardPlan&);

  bool two_terms = false;          // multiplies operands of ForwardTraits::two_terms
  bool finds_norms = false;        // finds norms of whole documents, if rows are to be normalized
  bool scales_documents = false;   // takes a scale for each document token
  bool takes_fp16_copies = false;  // takes rows that were converted to fp16, with scales if scales_documents
  bool takes_shares = false;       // packed or listed: takes work_tile_ends, shares of about equal time
  bool takes_slots = false;        // packed: takes documents as slots of a tile
  // Changes the plan for scores alone to one with winners, or for listed pairs.
  ForwardPlan (*adapt)(const ForwardPlan&, const Sizes&, const ForwardTraits&, const Device&, bool winners,
                       bool listed) = nullptr;

  RegisteredKernel registered{*this};  // behind the members that the planner sorts and asks by
};

// A GPU's measured rules for the choice among its kernels; nothing: they leave the call to kernels' costs.
using ForwardRules = std::optional<ForwardPlan> (*)(const Sizes&, const ForwardTraits&, const Device&);
struct RegisteredRules {
  explicit RegisteredRules(ForwardRules rules);
};

}  // namespace late_interaction
