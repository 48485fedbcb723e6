"""The operators of cross entropy over a matrix of scores, or of a product: sums, and weights.

Scores are float32 ``[rows, columns]`` of contiguous rows, on the CPU float64 too; logits are scores times
``inverse_temperature``, a tensor of one number. Sums are ``[4, n]``: for each row (or column) the maximum
``m`` of its scores ``s``, the sums of ``e = exp((s - m) * inverse_temperature)`` and of ``e * (s - m)``, and
the sum of ``s``. None of the operators is differentiable; all are deterministic.

``softmax_row_sums(scores, inverse_temperature) -> sums``
    Of rows.
``softmax_rows_(scores, inverse_temperature, labels, first, factor, smoothing, weights) -> sums``
    The same, and into ``weights`` the derivatives of ``(factor * cross_entropy).sum()`` in the logits. Row
    ``i`` has the label ``labels[i]`` or, where that is None, ``first + i``; one that is no column is none. A
    row whose ``factor`` is 0 has weights of 0, whatever its scores are. ``weights`` has the shape of the
    scores, in float32, bfloat16 or float16 (float64 for such scores).
``softmax_sums_(scores, inverse_temperature, column_sums) -> row_sums``
    The sums of rows, and those of columns, which are merged into ``column_sums``. These start with maxima of
    ``torch.finfo(torch.float32).min`` and sums of 0.
``softmax_weights_(scores, inverse_temperature, row_terms, column_terms, labels, first, smoothing, weights)``
    The weights where sums are known. Terms are ``[3, n]``: the maximum, ``factor`` divided by the sum of
    ``e``, and ``factor``. With ``column_terms`` those of the cross entropy of columns are added, whose labels
    are the rows that have them as their label. Both directions have as many classes as there are columns.

``softmax_product_rows_(Q, D, inverse_temperature, labels, first, factor, weights, scaled_Q) -> sums``
    What ``softmax_rows_`` does without smoothing, of the scores ``Q @ D.T``, which are never in memory. ``Q
    [rows, d]`` and ``D [columns, d]`` are bfloat16 that ``can_softmax_product_rows(Q, D)`` takes. The
    weights, bfloat16 of rows that begin at multiples of 16 bytes, lack a scale of each row. ``scaled_Q``,
    bfloat16 ``[rows, d]``, becomes ``Q`` times it; None: it is not wanted. Sums are ``[6, rows]``: a score
    ``m`` of the row or one near it, the sums of ``e`` and of ``e * (s - m)``, 0, the score of the label (NaN:
    there is none), and the scale.
``scale_rows_(x, scale, out)``
    ``out`` becomes ``x`` times ``scale``, one float32 or one for each ``x[i]``, rounded once to its dtype.

``dispatch`` registers them, ``cpu`` has the CPU's kernels.
"""
