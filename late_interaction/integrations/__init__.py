"""Other libraries on these kernels, a module or a folder each.

:func:`late_interaction.patch` puts what is here into a library; what needs no patch is in
:mod:`late_interaction.integrations.sentence_transformers`, :mod:`late_interaction.integrations.vllm` and
:mod:`late_interaction.integrations.lancedb`.
"""

__all__: list[str] = []
