// Compiles the functions between the two marks for another instruction set, so that one baseline build holds
// every kernel.
#pragma once

#define LI_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define LI_TARGET_BEGIN(isa) \
  LI_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define LI_TARGET_END LI_PRAGMA(clang attribute pop)
#else
// The target stays on to the end of the file, where templates are instantiated. GCC 12's own AVX-512
// headers build "undefined" vectors from themselves and then warn about it (GCC bug 105593).
#define LI_TARGET_BEGIN(isa)                                \
  LI_PRAGMA(GCC diagnostic ignored "-Wuninitialized")       \
  LI_PRAGMA(GCC diagnostic ignored "-Wmaybe-uninitialized") \
  LI_PRAGMA(GCC target(isa))
#define LI_TARGET_END
#endif
