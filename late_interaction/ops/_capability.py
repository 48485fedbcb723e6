"""The compute capability that calls are planned for."""

from __future__ import annotations

from late_interaction.ops._library import operators


def cuda_capability(force: int | None = None) -> int:
    """Return the compute capability that calls on the current GPU are planned for, as 10 * major + minor.

    Args:
        force: plan all calls of this process as for a GPU of this capability, with its kernels and its shared
            memory; 0 plans for the GPU that is here again. None changes nothing.

    Raises:
        ValueError: no GPU of that capability is known, or this one lacks its instructions.
        RuntimeError: there is no GPU, or no CUDA library.
    """
    try:
        capability: int = operators.cuda_capability.default(force)
    except RuntimeError as error:
        if "cuda_capability takes" in str(error):
            raise ValueError(str(error)) from None
        raise
    return capability
