"""The operators on hidden states: documents that are projected as they are scored.

``maxsim_from_hidden(Q, H, W, b, q_mask, d_mask, normalize=True, precision="highest") -> scores``
    ``D`` is the rows of ``H [Nd, Ld, d_model]`` times ``W.T [d_model, d]`` plus ``b [d]``, ``normalize`` for
    it alone; a chunk of documents at a time. Differentiable in ``Q``, ``H``, ``W`` and ``b``, which share a
    dtype or mix float32 with one half precision, which then is what multiplies.
``maxsim_from_hidden_winners(...the same...) -> (scores, winners)``
    Differentiable in ``scores``.
``maxsim_from_hidden_backward(grad_scores, Q, H, W, b, winners, normalize=True, precision="highest",
need_grad_Q=True, need_grad_H=True, need_grad_W=True, need_grad_b=True) -> (grad_Q, grad_H, grad_W, grad_b)``
    Deterministic. A gradient that is not needed comes back with zero elements. Not differentiable again.

``dispatch`` registers them, ``driver`` has their kernels, ``chunking`` says how many documents a chunk has,
and ``fallback`` has the dtypes that multiply, and the steps in plain PyTorch.
"""
