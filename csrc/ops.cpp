// Every operator of the library, on one page. The kernels behind them are registered by
// csrc/cpu/register.cpp (CPU) and csrc/cuda/*/entry.cpp (CUDA); fake kernels, autograd and autocast
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
// paired: query i meets document i alone. D is [Nq, Ld, d], its mask [Nq, Ld], scores [Nq], winners [Nq, Lq].
//
// precision says how fp32 inputs multiply: "highest" (fp32 accuracy), "high" (the significant bits of TF32),
// "medium" (bf16), "fp16" (what autocast to float16 asks for); the last two may be TF32. Other dtypes
// multiply as they are, but with normalize perhaps as fp16 copies of unit rows (plan/operand_conversion.h).
// backward names the gradient strategy: "auto", "lowmem", "unified".
#include <algorithm>
#include <cstdint>

#include "common/plaid_tensors.h"
#include "common/registration.h"
#include "common/tensors.h"
#include "plan/backward/gathered_grad_q.h"
#include "plan/backward/short_docs.h"
#include "plan/backward/tiled_grad_d.h"
#include "plan/forward/select.h"
#include "plan/l2_parts.h"
#include "plan/operand_conversion.h"
#include "plan/plaid.h"
#include "plan/plan.h"

LATE_INTERACTION_LIBRARY(m) {
  // Scores alone. Differentiable: its backward finds the winners again instead of storing them.
  m.def(
      "maxsim(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, bool normalize=False, "
      "str precision='highest', str backward='auto', bool paired=False) -> Tensor");

  // Scores and the winners that the backward needs. Differentiable in the scores.
  m.def(
      "maxsim_winners(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, bool normalize=False, "
      "str precision='highest', str backward='auto', bool paired=False) -> (Tensor scores, Tensor winners)");

  // Gradients from saved winners, in the dtypes of Q and D. A gradient that is not needed is not
  // computed and comes back with zero elements.
  m.def(
      "maxsim_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor winners, bool normalize=False, "
      "str backward='auto', bool need_grad_Q=True, bool need_grad_D=True, bool paired=False) "
      "-> (Tensor grad_Q, Tensor grad_D)");

  // These three without a kernel of the Autograd key, which is written in Python: autograd functions and
  // compiled graphs call them.
  m.def(
      "maxsim_no_autograd(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, bool normalize=False, "
      "str precision='highest', str backward='auto', bool paired=False) -> Tensor");
  m.def(
      "maxsim_winners_no_autograd(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, bool normalize=False, "
      "str precision='highest', str backward='auto', bool paired=False) -> (Tensor scores, Tensor winners)");
  m.def(
      "maxsim_backward_no_autograd(Tensor grad_scores, Tensor Q, Tensor D, Tensor winners, bool "
      "normalize=False, "
      "str backward='auto', bool need_grad_Q=True, bool need_grad_D=True, bool paired=False) "
      "-> (Tensor grad_Q, Tensor grad_D)");

  // The same, with winners found again as a forward with these masks and this precision finds them, a part at
  // a time where those of all would take over 16 MiB. "auto" is "lowmem" here. On the CPU written in Python
  // (late_interaction/ops/dense.py), all winners at once.
  m.def(
      "maxsim_backward_recompute(Tensor grad_scores, Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, "
      "bool normalize=False, str precision='highest', str backward='auto', bool need_grad_Q=True, "
      "bool need_grad_D=True, bool paired=False) -> (Tensor grad_Q, Tensor grad_D)");

  // The three of them with weights of query tokens: the maximum of query token s of query i counts
  // q_weights[i, s] times. Weights are shaped as Q without d, float32 (float64 for float64 inputs), of any
  // sign; one that is not finite makes its query's scores NaN. Differentiable in the weights as well, whose
  // gradient comes with that of Q alone. The backward of the first one finds the winners again, all of them
  // at once.
  m.def(
      "maxsim_weighted(Tensor Q, Tensor D, Tensor q_weights, Tensor? q_mask, Tensor? d_mask, "
      "bool normalize=False, str precision='highest', str backward='auto', bool paired=False) -> Tensor");
  m.def(
      "maxsim_weighted_winners(Tensor Q, Tensor D, Tensor q_weights, Tensor? q_mask, Tensor? d_mask, "
      "bool normalize=False, str precision='highest', str backward='auto', bool paired=False) "
      "-> (Tensor scores, Tensor winners)");
  m.def(
      "maxsim_weighted_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor q_weights, Tensor winners, "
      "bool normalize=False, str backward='auto', bool need_grad_Q=True, bool need_grad_D=True, "
      "bool paired=False, bool need_grad_weights=True) -> (Tensor grad_Q, Tensor grad_D, Tensor "
      "grad_weights)");

  // Those three for packed tokens, Q and D [tokens, d]: query i is tokens [cu_seqlens_q[i], cu_seqlens_q[i +
  // 1]), and every query meets every document. Offsets are int32, [Nq + 1] and [Nd + 1]; they are read on the
  // device. Winners are [Nd, tokens of Q], counted from the beginning of their document; int32 where D has
  // more than 65534 tokens.
  m.def(
      "maxsim_varlen(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d, str precision='highest') "
      "-> Tensor");
  m.def(
      "maxsim_varlen_winners(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d, "
      "str precision='highest') -> (Tensor scores, Tensor winners)");
  // Deterministic. Tokens that belong to no sequence get a gradient of zero.
  m.def(
      "maxsim_varlen_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_d, Tensor winners, bool need_grad_Q=True, bool need_grad_D=True) "
      "-> (Tensor grad_Q, Tensor grad_D)");
  // The same, added to sums [tokens, d] in the type of sums; one that is not given is not needed.
  m.def(
      "maxsim_varlen_backward_into_(Tensor grad_scores, Tensor Q, Tensor D, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_d, Tensor winners, Tensor(a!)? q_sums, Tensor(b!)? d_sums) -> ()");

  // With weights, [tokens of Q], as those of maxsim_weighted.
  m.def(
      "maxsim_varlen_weighted(Tensor Q, Tensor D, Tensor q_weights, Tensor cu_seqlens_q, Tensor "
      "cu_seqlens_d, "
      "str precision='highest') -> Tensor");
  m.def(
      "maxsim_varlen_weighted_winners(Tensor Q, Tensor D, Tensor q_weights, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_d, str precision='highest') -> (Tensor scores, Tensor winners)");
  m.def(
      "maxsim_varlen_weighted_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor q_weights, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_d, Tensor winners, bool need_grad_Q=True, "
      "bool need_grad_D=True) -> (Tensor grad_Q, Tensor grad_D, Tensor grad_weights)");

  // Scores [pairs] of listed pairs of those: pair p is query pair_q[p] with document pair_d[p], int32. One
  // that names none, or whose query has more than max_seqlen_q tokens, scores NaN (on the CPU it is an
  // error). Winners are [pairs, max_seqlen_q].
  m.def(
      "maxsim_pairs_packed(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d, Tensor pair_q, "
      "Tensor pair_d, SymInt? max_seqlen_q=None, str precision='highest') -> Tensor");
  m.def(
      "maxsim_pairs_packed_winners(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d, "
      "Tensor pair_q, Tensor pair_d, SymInt max_seqlen_q, str precision='highest') -> (Tensor scores, "
      "Tensor winners)");
  // Deterministic.
  m.def(
      "maxsim_pairs_packed_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_d, Tensor pair_q, Tensor pair_d, Tensor winners, bool need_grad_Q=True, "
      "bool need_grad_D=True) -> (Tensor grad_Q, Tensor grad_D)");

  // With weights, [tokens of Q], as those of maxsim_weighted.
  m.def(
      "maxsim_pairs_packed_weighted(Tensor Q, Tensor D, Tensor q_weights, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_d, Tensor pair_q, Tensor pair_d, SymInt? max_seqlen_q=None, "
      "str precision='highest') -> Tensor");
  m.def(
      "maxsim_pairs_packed_weighted_winners(Tensor Q, Tensor D, Tensor q_weights, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_d, Tensor pair_q, Tensor pair_d, SymInt max_seqlen_q, str precision='highest') "
      "-> (Tensor scores, Tensor winners)");
  m.def(
      "maxsim_pairs_packed_weighted_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor q_weights, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_d, Tensor pair_q, Tensor pair_d, Tensor winners, "
      "bool need_grad_Q=True, bool need_grad_D=True) -> (Tensor grad_Q, Tensor grad_D, Tensor grad_weights)");

  // Scores [documents] of one query, Q [tokens, d], with documents that lie anywhere in D [tokens, d]:
  // document j has lengths[j] tokens from starts[j] on, int32. One that does not lie within D scores NaN (on
  // the CPU it is an error). Not differentiable.
  m.def("maxsim_spans(Tensor Q, Tensor D, Tensor starts, Tensor lengths, str precision='highest') -> Tensor");

  // Scores of quantized tokens: Q and D are codes, both float8_e4m3fn, float8_e5m2 or int8, and a token is
  // code * scale. Scales are fp32, 0-dim (one for all tokens) or shaped as a mask (one a token), and not
  // negative: score = sum_s scale_Q[s] * max_t (scale_D[t] * <Q_s, D_t>). Not differentiable.
  m.def(
      "maxsim_quantized(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, Tensor? q_mask, Tensor? d_mask) "
      "-> Tensor");

  // The same by way of fp32 copies, a slice of D at a time: what maxsim_quantized does where a GPU has no
  // kernel for the call. Written in Python (late_interaction/ops/quantized.py).
  m.def(
      "maxsim_dequantized(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, Tensor? q_mask, "
      "Tensor? d_mask) -> Tensor");

  // Codes (float8_e4m3fn, float8_e5m2 or int8) of rows [..., d], each row with a scale, float32 [...], that
  // maps its largest magnitude to the largest code. Of a row that is not finite the scale is NaN. CUDA alone.
  m.def("quantize_rows_(Tensor rows, Tensor(a!) codes, Tensor(b!) scale) -> ()");

  // Scores of packed codes, lowest bits of a byte first. Not differentiable.
  // Q and D are bits, uint8 [.., ceil(d / 8)]; a similarity is d - 2 * (bits that differ), the inner product
  // of vectors of +1 and -1. The bits behind the last dim are 0.
  m.def("maxsim_hamming(Tensor Q, Tensor D, SymInt d, Tensor? q_mask, Tensor? d_mask) -> Tensor");
  // Q is int8 codes of d dims, D codes of nbits, 1 (set: +1, else -1) or 4 (value - 8), uint8
  // [.., ceil(d * nbits / 8)]; scales are those of maxsim_quantized.
  m.def(
      "maxsim_asymmetric(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, Tensor? q_mask, Tensor? d_mask, "
      "int nbits) -> Tensor");

  // The three of them for packed documents, D [tokens, w] with int32 offsets [Nd + 1], as those of
  // maxsim_varlen; scale_D is 0-dim or [tokens]. Queries are padded: Q [Nq, Lq, w].
  m.def(
      "maxsim_quantized_packed(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, Tensor? q_mask, "
      "Tensor cu_seqlens_d) -> Tensor");
  m.def("maxsim_hamming_packed(Tensor Q, Tensor D, SymInt d, Tensor? q_mask, Tensor cu_seqlens_d) -> Tensor");
  m.def(
      "maxsim_asymmetric_packed(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, Tensor? q_mask, "
      "Tensor cu_seqlens_d, int nbits) -> Tensor");

  // Scores of residual-compressed documents (PLAID): a token is centroids[code] + bucket_weights[bucket of
  // each dim], with nbits (1, 2, 4, 8) a bucket, packed from the lowest bits of a byte on. codes int32 and
  // residuals uint8 are [Nd, Ld] and [Nd, Ld, bytes] with the documents' lengths [Nd] as extents, or [tokens]
  // and [tokens, bytes] with their offsets [Nd + 1], both int32 or int64. Q and centroids are of any floating
  // dtype, each of its own; bucket_weights are fp32. Tokens are rounded to the dtype that Q multiplies in. A
  // code that is out of range counts as 0. Differentiable in Q.
  m.def(
      "maxsim_residual(Tensor Q, Tensor codes, Tensor residuals, Tensor extents, Tensor centroids, "
      "Tensor bucket_weights, int nbits, bool normalize=True, str precision='highest') -> Tensor");

  // The same with winners, which are int32 for packed documents.
  m.def(
      "maxsim_residual_winners(Tensor Q, Tensor codes, Tensor residuals, Tensor extents, Tensor centroids, "
      "Tensor bucket_weights, int nbits, bool normalize=True, str precision='highest') -> (Tensor scores, "
      "Tensor winners)");

  // The gradient of Q from saved winners, in the dtype of Q.
  m.def(
      "maxsim_residual_backward(Tensor grad_scores, Tensor Q, Tensor codes, Tensor residuals, "
      "Tensor extents, Tensor centroids, Tensor bucket_weights, Tensor winners, int nbits, "
      "bool normalize=True) -> Tensor");

  // maxsim_residual on CUDA for 128 dims of 2 bits, float32 scores. Q and tokens are normalized if there are
  // inverse_norms, float16, as many as codes: 1 / norm of what each token stands for. Neither tokens nor
  // centroids are read: a token's similarities are those of its centroid, found once, and those of its
  // residual, for which Q and bucket_weights are rounded to int8.
  m.def(
      "maxsim_residual_normed(Tensor Q, Tensor codes, Tensor residuals, Tensor? inverse_norms, Tensor "
      "extents, "
      "Tensor centroids, Tensor bucket_weights) -> Tensor");

  // Scores [B] of one query by centroids alone: query_centroid_scores [n, Lq] fp32 or fp64, codes int32
  // [B, Ld], doc_lengths [B], int32 or int64. Not differentiable.
  m.def("plaid_approx_score(Tensor query_centroid_scores, Tensor codes, Tensor doc_lengths) -> Tensor");

  // The smooth maximum: as maxsim, with tau * logsumexp(similarities / tau) over a document's tokens in place
  // of their maximum. Differentiable. Written in Python (late_interaction/ops/smooth/), over the two below on
  // CUDA where they take the inputs.
  m.def(
      "smooth_maxsim(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, float tau=0.1, "
      "bool normalize=False, str precision='highest', bool paired=False) -> Tensor");
  // Its gradients: similarities and their weights are computed again, a block at a time.
  m.def(
      "smooth_maxsim_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, "
      "float tau=0.1, bool normalize=False, str precision='highest', bool need_grad_Q=True, "
      "bool need_grad_D=True, bool paired=False) -> (Tensor grad_Q, Tensor grad_D)");
  // CUDA alone, bfloat16 and float16 of up to 128 dims, in eights: Q [groups, rows, d] with all of D [groups,
  // documents, Ld, d], contiguous, masked tokens zeros. logs [groups, documents, rows]: base-2 logs of the
  // sums over a document's tokens of 2^(log2(e) / tau * similarity), -inf where it has none.
  m.def("smooth_logs(Tensor Q, Tensor D, Tensor? d_mask, float tau) -> Tensor");
  // The gradient of Q or of D, float32 [groups, rows or tokens, d]; factors, as logs: gradients of tau *
  // ln(2)
  // * logs. Of a document without a token that counts the logs are
  // infinite here.
  m.def(
      "smooth_gradient(Tensor Q, Tensor D, Tensor? d_mask, Tensor logs, Tensor factors, float tau, "
      "bool of_documents) -> Tensor");

  // XTR scores [Nq, Nd] of Q [Nq, Lq, d] and D [Nd, Ld, d] (late_interaction/ops/xtr.py): of a query token's
  // similarities with all tokens of D the k largest count alone. rule: "paper" or "pylate". q_weights [Nq,
  // Lq] is a bool mask, or numbers of the scores' dtype that multiply the maxima. denominators [Nq, Nd] is
  // what the sums were divided by; winners are those of maxsim_winners, the sentinel where no similarity
  // counts. Differentiable in the scores, by maxsim_backward. Written in Python.
  m.def(
      "xtr_winners(Tensor Q, Tensor D, Tensor? q_weights, Tensor? d_mask, int k, str rule='paper', "
      "str precision='highest', str backward='auto') -> (Tensor scores, Tensor denominators, "
      "Tensor winners)");
  // A step of it: of each row of similarities [rows, documents * Ld], fp32 or fp64, the k largest are
  // selected; maxima [rows, documents] and winners (int32, likewise) are each document's largest selected one
  // and its token, 0 and -1 where there is none. zero_unless_all: a similarity that is not selected counts as
  // 0, so a maximum below 0 needs a document that is selected whole.
  m.def(
      "xtr_select_(Tensor similarities, Tensor? d_mask, int Ld, int k, bool zero_unless_all, "
      "Tensor(a!) maxima, Tensor(b!) winners) -> ()");

  // The same for embeddings of half precision, in two steps, on CUDA alone. The similarities of Q [rows, d]
  // with D [documents * Ld, d] are taken in groups of two (common/xtr.h): group_maxima [rows, groups] is the
  // largest of each, rounded to that half precision, of those that d_mask keeps. Then the similarities of
  // groups that may hold a selected one are computed again, in fp32. d is a multiple of 8; Q, D and
  // group_maxima are at multiples of 16 bytes.
  m.def("xtr_group_maxima_(Tensor Q, Tensor D, Tensor? d_mask, Tensor(a!) group_maxima) -> ()");
  m.def(
      "xtr_select_in_groups_(Tensor group_maxima, Tensor Q, Tensor D, Tensor? d_mask, int Ld, int k, "
      "bool zero_unless_all, Tensor(a!) maxima, Tensor(b!) winners) -> ()");

  // Pooling. Clusters of the tokens [tokens, d] of packed documents, each document by itself: at most
  // clusters[i], int32 [documents], of document i. labels, int32 [tokens], are a token's cluster, counted
  // from 0 in its document; found, int32 [documents], how many clusters there are. Not differentiable.
  // Written in Python (late_interaction/ops/pooling.py).
  m.def("ward_labels(Tensor tokens, Tensor cu_seqlens, Tensor clusters) -> (Tensor labels, Tensor found)");
  m.def(
      "kmeans_labels(Tensor tokens, Tensor cu_seqlens, Tensor clusters, int iterations=10) "
      "-> (Tensor labels, Tensor found)");
  // A step of ward_labels: similarities, fp32 or fp64, are each document's [n, n], one after another; what
  // lies above their diagonals is read. longest: no document has more tokens; CUDA sizes its workspace by it.
  // NaN is an error on the CPU, and so are offsets and clusters that do not fit; on CUDA found is -1 then.
  m.def(
      "ward_cut_(Tensor similarities, Tensor cu_seqlens, Tensor clusters, int longest, Tensor(a!) labels, "
      "Tensor(b!) found) -> ()");

  // MUVERA's fixed dimensional encodings [sequences, dim], float32, of tokens [N, L, d] with a bool mask [N,
  // L], or of packed tokens [tokens, d] with cu_seqlens, int32 [N + 1]. hyperplanes are [d, columns], of
  // which repetitions * k_sim count: columns is the least multiple of 16 that holds them, as for the d_proj
  // columns of projection [repetitions, d, columns]. buckets (int32, in [0, d_final)) and signs (fp32) are
  // the count sketch, of all dims before it. average, fill_empty: as for documents. scale multiplies the
  // result. A sequence with a token that is not finite becomes NaN. Not differentiable. Wrong cu_seqlens and
  // buckets are errors on the CPU; on CUDA offsets are clamped, and such buckets take part in nothing.
  m.def(
      "muvera_encode(Tensor tokens, Tensor? mask, Tensor? cu_seqlens, Tensor hyperplanes, Tensor? "
      "projection, "
      "Tensor? buckets, Tensor? signs, int k_sim, int repetitions, int d_proj, int d_final, bool average, "
      "bool fill_empty, float scale) -> Tensor");

  // Scores of documents that are hidden states still: D = normalize(H W^T + b), a chunk of documents at a
  // time, with H [Nd, Ld, d_model], W [d, d_model] and b [d]. Q is [Nq, Lq, d] as it is: normalize is for D
  // alone. Differentiable; these are written in Python (late_interaction/ops/from_hidden/).
  m.def(
      "maxsim_from_hidden(Tensor Q, Tensor H, Tensor W, Tensor? b, Tensor? q_mask, Tensor? d_mask, "
      "bool normalize=True, str precision='highest') -> Tensor");
  m.def(
      "maxsim_from_hidden_winners(Tensor Q, Tensor H, Tensor W, Tensor? b, Tensor? q_mask, Tensor? d_mask, "
      "bool normalize=True, str precision='highest') -> (Tensor scores, Tensor winners)");
  m.def(
      "maxsim_from_hidden_backward(Tensor grad_scores, Tensor Q, Tensor H, Tensor W, Tensor? b, "
      "Tensor winners, bool normalize=True, str precision='highest', bool need_grad_Q=True, "
      "bool need_grad_H=True, bool need_grad_W=True, bool need_grad_b=True) "
      "-> (Tensor grad_Q, Tensor grad_H, Tensor grad_W, Tensor grad_b)");

  // Steps of those, on rows that are still in L2. Not differentiable.
  // rows [rows, d] = hidden W^T + b, as unit vectors with normalize: then the inverses of their norms come
  // back, else nothing does. active_rows, bool [rows]: the others are neither read nor written. Where there
  // is no kernel for tensors like these (can_project_rows), a matrix product of PyTorch and
  // l2_normalize_rows_ do it.
  m.def("can_project_rows(Tensor hidden, Tensor W, Tensor? b) -> bool");
  m.def(
      "project_rows_(Tensor(a!) rows, Tensor hidden, Tensor W, Tensor? b, Tensor? active_rows, "
      "bool normalize) -> Tensor");
  // maxsim_from_hidden's scores in one pass, of hidden [Nd * Ld, d_model] that can_project_rows takes and of
  // at most 64 query tokens in all. CUDA alone.
  m.def(
      "project_scores(Tensor Q, Tensor hidden, Tensor W, Tensor? b, Tensor? q_mask, Tensor? d_mask, int Ld, "
      "bool normalize) -> Tensor");
  // Rows of x [rows, d] become unit vectors in place; the inverses of their norms come back.
  m.def("l2_normalize_rows_(Tensor(a!) x) -> Tensor");
  // Which tokens of documents of Ld tokens are the winner of some query token, bool [Nd * Ld], from winners
  // [Nq, Nd, Lq].
  m.def("argmax_mask(Tensor winners, int Ld) -> Tensor");
  // maxsim_backward (lowmem) into given tensors; one of zero elements is a gradient that is not needed. With
  // inverse, D [Nd, Ld, d] holds the rows that l2_normalize_rows_ left and inverse what it returned, and
  // grad_D is the gradient of the rows before it. grad_D may be D itself, which takes a second launch. With
  // sums [Nq, Lq, d] several calls, each with other documents, add up grad_Q: the first overwrites sums, the
  // last writes grad_Q. The gradient of D is added to d_sums [Nd, Ld, d] where they are given, and grad_D has
  // no elements then.
  m.def(
      "maxsim_backward_into_(Tensor grad_scores, Tensor Q, Tensor D, Tensor? inverse, Tensor winners, "
      "Tensor(a!) grad_Q, Tensor(b!) grad_D, Tensor(c!)? sums, bool first, bool last, "
      "Tensor(d!)? d_sums=None) -> ()");
  // partials [splits, d, d_model] += grad^T hidden over the active rows, an equal share of the rows a split;
  // overwrite: = instead of +=. A row that is not active is not read, whatever it holds.
  m.def(
      "wgrad_splitk_(Tensor(a!) partials, Tensor grad, Tensor hidden, Tensor active_rows, bool overwrite) -> "
      "()");

  // Cross entropy of scores [rows, columns] times inverse_temperature (0-dim): fp32 with contiguous rows; on
  // the CPU fp64 too. Not differentiable. Sums are [4, n]: for each row or column the maximum m of its scores
  // s, the sums of e = exp((s - m) * inverse_temperature) and of e * (s - m), and the sum of s. On the CPU
  // written in Python (late_interaction/ops/softmax.py).
  m.def("softmax_row_sums(Tensor scores, Tensor inverse_temperature) -> Tensor");
  // The same; and weights [rows, columns], the derivatives of sum_i factor[i] * cross_entropy(row i) in the
  // logits. Row i has label labels[i], int64, or column first + i; one that is no column is none. A row of
  // factor 0 has weights of 0.
  m.def(
      "softmax_rows_(Tensor scores, Tensor inverse_temperature, Tensor? labels, int first, Tensor factor, "
      "float smoothing, Tensor(a!) weights) -> Tensor");
  // The sums of rows; those of columns join column_sums, whose maxima start at the lowest float32 and whose
  // sums at 0.
  m.def("softmax_sums_(Tensor scores, Tensor inverse_temperature, Tensor(a!) column_sums) -> Tensor");
  // Weights from terms that are known, [3, n]: the maximum, factor / sum of e, and factor. column_terms: of
  // the cross entropy of columns as well, whose labels are the rows that have them as their label.
  m.def(
      "softmax_weights_(Tensor scores, Tensor inverse_temperature, Tensor row_terms, Tensor? column_terms, "
      "Tensor? labels, int first, float smoothing, Tensor(a!) weights) -> ()");

  // out = x times scale, fp32 of one number or one for each x[i], rounded to the dtype of out once:
  // contiguous bf16, fp16 or fp32 of as many elements.
  m.def("scale_rows_(Tensor x, Tensor scale, Tensor(a!) out) -> ()");
  // The same as softmax_rows_ without smoothing, of scores Q D^T that are never in memory. Q [rows, d] and D
  // [columns, d] are bf16 that can_softmax_product_rows takes. Weights, bf16 of rows that begin at multiples
  // of 16 bytes, lack the scale factor / sum of each row, which is a power of e above or below its softmax's:
  // it comes back, and scaled_Q, bf16 [rows, d], is Q times it. Returns fp32 [6, rows]: a score m of the row,
  // or near one; the sums of e = exp((s - m) * inverse_temperature) and of e * (s - m); 0; the score of the
  // label, or NaN; the scale, 0 where the factor is.
  m.def("can_softmax_product_rows(Tensor Q, Tensor D) -> bool");
  m.def(
      "softmax_product_rows_(Tensor Q, Tensor D, Tensor inverse_temperature, Tensor? labels, int first, "
      "Tensor factor, Tensor(a!) weights, Tensor(b!)? scaled_Q) -> Tensor");

  // Steps of a search. Scores are fp32, a row a query; of two documents the better one has the larger score
  // (largest) or the smaller one, and of equal scores the one with the lower index wins. Indices are int64 in
  // [0, 2^32). A score of NaN or an index below 0 is no document: it comes behind all documents, with the
  // worst score (-inf, or inf) and index -1. On the CPU written in Python (late_interaction/ops/topk.py); on
  // CUDA k is at most 1024. Not differentiable. The min(k, columns + found) best of each row, best first: of
  // the columns of scores, whose documents are indices [rows, columns] or first, first + 1, ..., and of those
  // that were found before, [rows, found].
  m.def(
      "select_best(Tensor scores, Tensor? indices, int first, Tensor? found_scores, Tensor? found_indices, "
      "int k, bool largest) -> (Tensor scores, Tensor indices)");
  // The payload of a search's process, int64 [size]: for each row `width` keys, which compare as documents
  // do: first those of the documents that it found, then keys of no document; then zeros; at the end the
  // notes.
  m.def(
      "pack_found(Tensor scores, Tensor indices, int width, int size, int[] notes, bool largest) -> Tensor");
  // packed[place] += factor * (the sum of each byte of x times its place, 1 to 8191 and from 1 again), modulo
  // 2^64.
  m.def("add_checksum_(Tensor(a!) packed, int place, Tensor x, int factor) -> ()");
  // The k best of each row of what all processes packed, int64 [processes, size], best first, and their
  // notes, [processes, notes]. A process's first note is how many documents it has: indices are those among
  // the documents of all.
  m.def(
      "merge_found(Tensor packed, int rows, int width, int notes, int k, bool largest) -> (Tensor scores, "
      "Tensor indices, Tensor notes)");

  // to = source, uint8 [n] of a device and of the host, on the current stream, by way of staging, uint8
  // [slots, bytes] in pinned memory: a ring of slots, used in turn from slot first on. events: int64 [slots],
  // the handles of CUDA events. A slot's event is recorded when its transfer has ended, and waited for before
  // the slot is filled again. Only where the CUDA library is loaded.
  m.def("send_bytes_(Tensor(a!) to, Tensor source, Tensor(b!) staging, Tensor events, int first) -> ()");

  // What would be launched on CUDA for a call of this shape, in words. dtype is "bf16", "fp16", "fp32",
  // "fp64", or "e4m3", "e5m2" or "int8" with a scale a token; step is "forward", "backward" (which quantized
  // tokens have not), or "alternatives": the names of all plans that the forward could have, a line each, its
  // own first. sm is the compute capability as 10 * major + minor; geforce: the device's name says GeForce.
  m.def(
      "explain_plan(bool per_query, int Nq, int N, int Lq, int Ld, int d, str dtype, str precision, "
      "bool masked, bool normalize, str step, str backward, int sm, int sm_count, bool geforce=False) -> "
      "str");
  // The same for packed sequences of Lq and Ld tokens on average; step is "forward" or "backward".
  m.def(
      "explain_packed_plan(int Nq, int N, int Lq, int Ld, int d, str dtype, str precision, str step, int sm, "
      "int sm_count, bool geforce=False) -> str");
  // The same for documents of up to Ld tokens in residuals of nbits a dim; winners: for a backward.
  m.def(
      "explain_residual_plan(int Nq, int N, int Lq, int Ld, int d, str dtype, str precision, int nbits, "
      "bool winners, int sm, int sm_count) -> str");

  // Which CPU kernels run: "portable", "avx2", "avx512" or "avx512_bf16". Tests force one by its name; ""
  // goes back to the best that this CPU has.
  m.def("cpu_isa(str force='') -> str");

  // The compute capability, 10 * major + minor, that the current CUDA device is planned as. Tests force an
  // older one, and with it the kernels that need no more; 0 goes back to the device's own. Only where the
  // CUDA library is loaded.
  m.def("cuda_capability(int? force=None) -> int");

  // The plan, by a name of explain_plan's alternatives, that every forward of the process gets; one that
  // cannot have it is an error. To measure plans against each other; '' goes back to the planner's choice.
  m.def("forced_plan(str? force=None) -> str");
}

namespace late_interaction {

namespace {

Dtype dtype_named(const std::string& name) {
  if (name == "bf16") return Dtype::bf16;
  if (name == "fp16") return Dtype::fp16;
  if (name == "fp32") return Dtype::fp32;
  if (name == "fp64") return Dtype::fp64;
  if (name == "e4m3") return Dtype::e4m3;
  if (name == "e5m2") return Dtype::e5m2;
  if (name == "int8") return Dtype::int8;
  STD_TORCH_CHECK(false, "late_interaction: no dtype is named ", in_quotes(name));
}

Device planned_device(int64_t sm, int64_t sm_count, bool geforce) {
  STD_TORCH_CHECK(sm >= 75 && sm < 1000 && sm_count >= 1 && sm_count < 10000,
                  "late_interaction: not a device");
  return device_of_capability(static_cast<int>(sm), static_cast<int>(sm_count), geforce);
}

bool is_empty(const Sizes& s) {
  STD_TORCH_CHECK(s.Nq >= 0 && s.N >= 0 && s.Lq >= 0 && s.Ld >= 0 && s.d >= 1,
                  "late_interaction: not a shape");
  STD_TORCH_CHECK(std::max({s.Nq, s.N, s.Lq, s.Ld, s.d}) <= INT32_MAX,
                  "late_interaction: a size must be below 2**31");
  return s.Nq == 0 || s.N == 0 || s.Lq == 0 || s.Ld == 0;
}

constexpr const char* kEmpty = "no kernel: the call is empty\n";

std::string explain_plan(bool per_query, int64_t Nq, int64_t N, int64_t Lq, int64_t Ld, int64_t d,
                         std::string dtype, std::string precision, bool masked, bool normalize,
                         std::string step, std::string backward, int64_t sm, int64_t sm_count, bool geforce) {
  const Sizes sizes{per_query ? Layout::per_query : Layout::in_batch, Nq, N, Lq, Ld, d};
  const Device device = planned_device(sm, sm_count, geforce);
  const Precision how_fp32 = parse_precision(precision);
  const Backward method = parse_backward(backward);
  if (is_empty(sizes)) return kEmpty;
  const Dtype type = dtype_named(dtype);
  if (step == "forward" || step == "alternatives") {
    const OperandConversion how = plan_operand_conversion(sizes, type, how_fp32, masked, normalize, device);
    const int64_t row_bytes = d * element_bytes(compute_for(how.dtype, how.precision));
    const ForwardTraits traits{
        .dtype = how.dtype,
        .precision = how.precision,
        .masked = masked,
        .scaled = (normalize && how.copies != Copies::normalized_fp16) || is_quantized(type),
        .given_scales = is_quantized(type),
        .tma_compatible = row_bytes % 16 == 0};  // as a dense tensor has it
    const std::vector<ForwardPlan> plans = how.copies == Copies::fp16x2
                                               ? std::vector{*plan_3xfp16(sizes, masked, !normalize, device)}
                                               : forward_alternatives(sizes, traits, device);
    if (step == "forward") {
      const int64_t documents =
          how.copies == Copies::fp16x2 ? N : documents_at_once(sizes, how.dtype, device);
      return explain(how.copies, type) + explain(sizes, plans[0]) + explain_rates(plans[0], device) +
             explain_documents_at_once(sizes, documents);
    }
    std::string names;
    for (const ForwardPlan& plan : plans) names += short_name(plan) + "\n";
    return names;
  }
  STD_TORCH_CHECK(step == "backward",
                  "late_interaction: step must be 'forward', 'backward' or 'alternatives', got ",
                  in_quotes(step));
  STD_TORCH_CHECK(!is_quantized(type), "late_interaction: quantized tokens have no backward");
  const bool vectors = d % (type == Dtype::fp64 ? 2 : 4) == 0;
  const Sizes own = with_own_documents(sizes);
  const ShortDocsPlans shorts = plan_short_docs(own, type, d % 8 == 0, normalize, method, device);
  if (shorts.serve_both()) return explain(shorts);
  const BackwardPlan plan = plan_backward(own, type, vectors, normalize, method, device);
  if (plan.method == Backward::unified) return explain(own, plan);
  if (shorts.serve_any()) return explain(own, plan) + explain(shorts);
  const auto gathered = normalize ? std::nullopt : plan_gathered_grad_q(own, type, d % 8 == 0, device);
  const auto tiled = normalize || gathered ? std::nullopt : plan_tiled_grad_q(own, type, d % 8 == 0, device);
  const auto grad_d = normalize ? std::nullopt : plan_tiled_grad_d(own, type, d % 8 == 0, device);
  const std::string kernels = explain(own, plan) + explain(gathered) + explain(tiled) + explain(grad_d);
  const bool q_has_a_kernel = gathered || tiled;
  if (q_has_a_kernel && grad_d) return kernels;
  const BackwardReads reads = q_has_a_kernel ? BackwardReads::queries : BackwardReads::both_sides;
  return kernels + explain(own, backward_part(own, type, device, reads, false));
}

std::string explain_packed_plan(int64_t Nq, int64_t N, int64_t Lq, int64_t Ld, int64_t d, std::string dtype,
                                std::string precision, std::string step, int64_t sm, int64_t sm_count,
                                bool geforce) {
  const Sizes call{Layout::in_batch, Nq, N, Lq, Ld, d};
  const Device device = planned_device(sm, sm_count, geforce);
  const Precision how = parse_precision(precision);
  if (is_empty(call)) return kEmpty;
  const Dtype given = dtype_named(dtype);
  STD_TORCH_CHECK(!is_quantized(given), "late_interaction: packed tokens have no quantized ones");
  const bool forward = step == "forward";
  STD_TORCH_CHECK(forward || step == "backward",
                  "late_interaction: step must be 'forward' or 'backward', got ", in_quotes(step));
  Sizes sizes = call;  // all query rows are one query's, but to the kernel of fp64
  if (!forward || given != Dtype::fp64) sizes.Nq = 1;
  sizes.Lq = sizes.Nq == 1 ? Nq * Lq : Lq;
  if (!forward) {
    const bool vectors = d % (given == Dtype::fp64 ? 2 : 4) == 0;
    const PackedParts parts = packed_backward_parts(sizes, given, device);
    const auto plan_of = [&](int64_t documents, int64_t rows) {
      const Sizes part{Layout::in_batch, sizes.Nq, documents, rows, Ld, d};
      return plan_backward(part, given, vectors, false, Backward::lowmem, device);
    };
    BackwardPlan plan = plan_of(N, parts.rows);
    const BackwardPlan of_grad_Q = plan_of(parts.documents, sizes.Lq);
    plan.gather_grid = of_grad_Q.gather_grid;
    plan.split = of_grad_Q.split;
    plan.grad_d_grid = N * Ld / plan.tile_tokens + N + 2;  // as varlen/backward.h has it
    return explain(sizes, plan) + explain(sizes, parts);
  }
  // fp32 that multiplies in half precision is converted before, as runtime/op_helpers.h has it.
  const bool half = given == Dtype::fp32 && (how == Precision::medium || how == Precision::fp16);
  const Dtype type = !half ? given : how == Precision::medium ? Dtype::bf16 : Dtype::fp16;
  const ForwardTraits traits{.dtype = type,
                             .precision = how,
                             .packed = true,
                             .ragged = true,
                             .tma_compatible = d * element_bytes(type) % 16 == 0};
  const ForwardPlan plan = plan_forward(sizes, traits, device);
  return explain(sizes, plan) + explain_rates(plan, device) +
         explain_documents_at_once(call, documents_at_once(sizes, type, device));
}

std::string explain_residual_plan(int64_t Nq, int64_t N, int64_t Lq, int64_t Ld, int64_t d, std::string dtype,
                                  std::string precision, int64_t nbits, bool winners, int64_t sm,
                                  int64_t sm_count) {
  const Sizes sizes{Layout::in_batch, Nq, N, Lq, Ld, d};
  const Device device = planned_device(sm, sm_count, false);
  const Precision how = parse_precision(precision);
  check_residual_bits(nbits);
  if (is_empty(sizes)) return kEmpty;
  const bool whole = d % 32 == 0;  // as a dense tensor has it
  const ResidualPlan plan = plan_residual(sizes, false, dtype_named(dtype), how, whole, winners, device);
  return explain(sizes, plan, static_cast<int>(nbits));
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("explain_plan", TORCH_BOX(&late_interaction::explain_plan));
  m.impl("explain_packed_plan", TORCH_BOX(&late_interaction::explain_packed_plan));
  m.impl("explain_residual_plan", TORCH_BOX(&late_interaction::explain_residual_plan));
}

LATE_INTERACTION_EMBED(namespace, LATE_INTERACTION_NAMESPACE)
