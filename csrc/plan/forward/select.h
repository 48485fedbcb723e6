// The choice of a forward's plan (plan_forward in plan.h), and the alternatives.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernel.h"

namespace late_interaction {

// The kernel of calls that none takes: quantized tokens are converted to float32 and scored as such.
extern const ForwardKernel dequantized;

// Every plan that a forward could have, the planner's choice first. No two have one name.
std::vector<ForwardPlan> forward_alternatives(const Sizes& s, const ForwardTraits& traits,
                                              const Device& device);

// The kernel and what distinguishes its plan: "direct 32", "wide", "documents 4x1" (teams of
// members), "rows 152", "rows 152 copied", "split 128", "split 128 paired"; "short 24x6" (documents of up to
// 24 tokens, 6 to a tile); "rows 152 cut 4", where documents are split into four ranges.
std::string short_name(const ForwardPlan& plan);

// fp32 at full accuracy from two fp16 numbers an element: nothing if no kernel takes them. Sizes are those of
// the fp32 inputs. scaled: each token has a scale, as tokens that are not normalized do.
std::optional<ForwardPlan> plan_3xfp16(const Sizes& sizes, bool masked, bool scaled, const Device& device);

// The plan for scores alone, changed for a call with winners or listed pairs.
ForwardPlan adapted(const ForwardPlan& plan, const Sizes& sizes, const ForwardTraits& traits,
                    const Device& device, bool winners, bool listed);

}  // namespace late_interaction
