// Linking late_interaction registers its operators.
#include <ATen/core/dispatch/Dispatcher.h>

int main() {
  return c10::Dispatcher::singleton().findSchema({"late_interaction::maxsim", ""}).has_value() ? 0 : 1;
}
