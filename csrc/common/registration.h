// Registers operators in the namespace that the build chose: -DLATE_INTERACTION_NAMESPACE=name makes them
// torch.ops.name.*, so that libraries of several builds load into one process. Python reads the name in the
// library's file (late_interaction/ops/_library.py).
#pragma once

#include <torch/csrc/stable/library.h>

#ifndef LATE_INTERACTION_NAMESPACE
#define LATE_INTERACTION_NAMESPACE late_interaction
#endif

// PyTorch's macros paste and quote what they are given as it stands, so another macro expands the name first.
#define LATE_INTERACTION_LIBRARY(m) LATE_INTERACTION_LIBRARY_IN(LATE_INTERACTION_NAMESPACE, m)
#define LATE_INTERACTION_LIBRARY_IN(ns, m) STABLE_TORCH_LIBRARY(ns, m)
#define LATE_INTERACTION_LIBRARY_IMPL(key, m) STABLE_TORCH_LIBRARY_IMPL(LATE_INTERACTION_NAMESPACE, key, m)

// An operator's name for whoever calls it by the dispatcher.
#define LATE_INTERACTION_QUALIFIED(name) LATE_INTERACTION_QUOTE(LATE_INTERACTION_NAMESPACE) "::" name

// A text in the library's file, late_interaction_<name>=<value>, for whoever asks before loading it.
#define LATE_INTERACTION_EMBED(name, value)           \
  [[gnu::used]] static const char embedded_##name[] = \
      "late_interaction_" #name "=" LATE_INTERACTION_QUOTE(value);
#define LATE_INTERACTION_QUOTE(value) LATE_INTERACTION_QUOTE_AS_IT_STANDS(value)
#define LATE_INTERACTION_QUOTE_AS_IT_STANDS(value) #value
