"""The operators of the smooth maximum: ``tau * logsumexp(similarities / tau)`` in place of the maximum.

``smooth_maxsim(Q, D, q_mask, d_mask, tau=0.1, normalize=False, precision="highest", paired=False) -> scores``
    Shapes, masks and ``precision`` are those of ``maxsim``. Differentiable; keeps nothing but its inputs for
    the backward.
``smooth_maxsim_backward(grad_scores, Q, D, q_mask, d_mask, tau=0.1, normalize=False, precision="highest",
need_grad_Q=True, need_grad_D=True, paired=False) -> (grad_Q, grad_D)``
    A gradient that is not needed comes back with zero elements. Deterministic. Not differentiable again.

``dispatch`` registers them. ``kernels`` has CUDA's for half precision of up to 128 dims (``smooth_logs``,
``smooth_gradient``), ``driver`` everything else: PyTorch's matrix products and softmax on blocks of
similarities, on every device.
"""
