// Measurements of an H200: as 9.0, for the rules of Hopper's kernels (cuda/forward/sm90_rules.cpp), and
// planned as 8.0, for the model of mma.sync's kernels. Other GPUs are planned by the same numbers, a
// multiprocessor, until they are measured.
#pragma once

#include "../forward/mma_plans.h"

namespace late_interaction::h200 {

// ---- planned as 8.0: fitted to all plans of 426 shapes (bf16), for the time of the lowest estimate ----

inline constexpr MmaCosts kDirect32{3.5, 0.043, 1.2, 0.13, 3.75}, kDirect8{3.7, 0.031, 0.58, 0.05, 3.0},
    kDirectLong{2.9, 0.025, 0.89, 0.11, 2.0};
inline constexpr MmaCosts kThin{3.7, 0.42, 0.59, 0.36, 3.65}, kThinShared{3.3, 1.2, 0.64, 0.39, 3.4};
inline constexpr MmaCosts kWide{3.6, 0.73, 0.0, 1.2, 2.1}, kWideShared{1.1, 6.0, 0.0, 1.0, 4.0};
inline constexpr MmaCosts kFewRows{6.5, 0.38, 0.53, 0.32, 2.7}, kManyRows{9.1, 0.88, 0.0, 0.98, 4.0};
inline constexpr MmaCosts kWarpEach{5.4, 0.15, 0.39, 0.082, 3.82}, kWarpEachWide{8.7, 0.23, 0.51, 0.1, 4.0};
inline constexpr MmaCosts kBlockEach{5.9, 0.33, 0.32, 0.45, 3.98}, kBlockEachWide{8.8, 0.91, 0.56, 0.41, 4.0};
inline constexpr MmaCosts kCodeStream{5.4, 0.031, 1.2, 0.16, 4.0};  // counted, not fitted
// Kernels that sum partials, and that combine splits, the latter for each wave of its blocks too.
inline constexpr double kSumKernel = 1.8, kCombineKernel = 3.0, kCombineWave = 0.2;

// ---- as it is: what a multiprocessor does in a microsecond ----

// Operations on two bytes an element; bytes that it reads alone, and while all read and share 4.38 TB/s.
inline constexpr double kProducts = 6e6, kReadAlone = 55e3, kReadTogether = 33e3;

}  // namespace late_interaction::h200
