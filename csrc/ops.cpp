// Every operator of the library, on one page. The kernels behind them are registered by
// csrc/cpu/register.cpp (CPU) and csrc/cuda/register.cpp (CUDA); fake kernels, autograd and autocast
// live in late_interaction/ops/.
//
// Shapes. Q is [Nq, Lq, d]. D is [Nd, Ld, d] (in-batch: every query meets every document) or
// [Nq, K, Ld, d] (per-query: each query meets its own K documents; pairs are K = 1). Below, N stands
// for Nd or K. Masks are bool, True = keep: q_mask [Nq, Lq]; d_mask [Nd, Ld] or [Nq, K, Ld].
//
//   scores   [Nq, N]      fp32 (fp64 for fp64 inputs)
//   winners  [Nq, N, Lq]  token index of each maximum. int16 while Ld <= 65534: the 16 bits are the
//                         unsigned index, 0xFFFF (-1) the sentinel "no winner". int32 above that.
//
// precision says how fp32 inputs multiply: "highest" (fp32 accuracy), "high" (TF32), "medium" (bf16),
// "fp16" (what autocast to float16 asks for). Other dtypes multiply as they are.
// backward names the gradient strategy: "auto", "lowmem", "unified".
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(late_interaction, m) {
  // Scores alone. Differentiable: its backward finds the winners again instead of storing them.
  m.def(
      "maxsim(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, bool normalize=False, "
      "str precision='highest', str backward='auto') -> Tensor");

  // Scores and the winners that the backward needs. Differentiable in the scores.
  m.def(
      "maxsim_winners(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, bool normalize=False, "
      "str precision='highest', str backward='auto') -> (Tensor scores, Tensor winners)");

  // Gradients from saved winners, in the dtypes of Q and D. A gradient that is not needed is not
  // computed and comes back with zero elements.
  m.def(
      "maxsim_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor winners, bool normalize=False, "
      "str backward='auto', bool need_grad_Q=True, bool need_grad_D=True) -> (Tensor grad_Q, Tensor grad_D)");

  // What would be launched on CUDA for a call of this shape, in words.
  m.def(
      "explain_plan(bool per_query, int Nq, int N, int Lq, int Ld, int d, str dtype, bool winners, "
      "str pass_name, str backward, int sm, int sm_count) -> str");

  // Which CPU kernels run: "portable", "avx2", "avx512" or "avx512_bf16". Tests force one by its name; ""
  // goes back to the best that this CPU has.
  m.def("cpu_isa(str force='') -> str");
}
