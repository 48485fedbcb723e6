// The plan of each forward kernel for a call, whether it suits the call or not; nullopt where it cannot run.
// forward_select.cpp says which one does; forward_enumerate.cpp lists them all, so that it can be measured.
#pragma once

#include <optional>

#include "plan.h"

namespace late_interaction {

// Query rows that each document token is multiplied with.
inline int64_t rows_per_document(const Sizes& s) { return s.layout == Layout::in_batch ? s.Nq * s.Lq : s.Lq; }

inline double similarities(const Sizes& s) { return 1.0 * s.Nq * s.Lq * s.N * s.Ld; }

inline double operations(const Sizes& s) { return 2.0 * s.d * similarities(s); }

// tokens: of a tile; 0 leaves them to the kernel, here and below.
std::optional<ForwardPlan> plan_sm80_short_docs(const Sizes& s, const ForwardTraits& traits,
                                                const Device& device, int tokens = 0);

// Longer documents are no business of that kernel, nor of its tile for a few tokens.
constexpr int64_t longest_direct(int tokens) { return tokens == 8 ? 64 : 512; }

std::optional<ForwardPlan> plan_sm90_stream(const Sizes& s, const ForwardTraits& traits,
                                            const Device& device);

// members: warps that share a document, 1 or all of a block.
std::optional<ForwardPlan> plan_sm80_d(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       int members = 0);

std::optional<ForwardPlan> plan_sm80_q(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       bool many_rows, bool fp16x2 = false);

// ffma: fp32 at full accuracy without the tensor cores.
std::optional<ForwardPlan> plan_sm80(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                     Sm80Tile tile, bool ffma = false);

// The plan with each document split into so many ranges, or fewer, if its kernel is sm80_q with few rows,
// sm80_d or sm80.
std::optional<ForwardPlan> split_sm80(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                      ForwardPlan plan, int num_splits);

// Tokens of a document that a block takes at once.
int64_t tokens_at_once(const ForwardPlan& plan);

// members: warpgroups that share a document's tiles. num_splits: ranges that each document is split into,
// here and below. winners, listed: kernel_limits.h.
std::optional<ForwardPlan> plan_sm90_d(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       int members = 0, int num_splits = 1, bool winners = false,
                                       bool listed = false);

// compacted: a kernel before copies the kept tokens of each document.
std::optional<ForwardPlan> plan_sm90_q(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       bool compacted, int tokens = 0, int num_splits = 1);

// Several short documents to a tile, `span` tokens each.
std::optional<ForwardPlan> plan_sm90_q_short(const Sizes& s, const ForwardTraits& traits,
                                             const Device& device, int span = 0);

// Numbers of splits that forward_alternatives() lists, and that forward_select.cpp prefers for it.
inline constexpr int kSplitCounts[] = {2, 3, 5, 16, 33, 132};

// paired: where query rows stream, two blocks load half of them for each other. fp16x2: for plan_3xfp16.
std::optional<ForwardPlan> plan_sm90_q_longd(const Sizes& s, const ForwardTraits& traits,
                                             const Device& device, bool paired, int tokens = 0,
                                             bool fp16x2 = false);

// ---- fp32 at full accuracy from two fp16 numbers an element ----

// Nothing where that kernel cannot take them. Sizes are those of the fp32 inputs; chunks are of 64 elements,
// both halves of each. scaled: tokens have scales of their own, as those that are not normalized do.
std::optional<ForwardPlan> plan_3xfp16(const Sizes& sizes, bool masked, bool scaled, const Device& device);

// ---- Kernels with fewer registers for winners, or for listed pairs: of sm90_d and sm80_d, for some widths
// ----

// The plan for scores alone, changed to what a call with winners or listed pairs needs.
ForwardPlan with_warpgroups_left(const ForwardPlan& plan, const Sizes& sizes, const ForwardTraits& traits,
                                 const Device& device, bool winners, bool listed);

}  // namespace late_interaction
