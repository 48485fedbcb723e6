"""Hard negatives of texts: :func:`mine_hard_negatives`."""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import check_flag, check_one_of, check_positive, is_one_of
from late_interaction.mining.negatives import Choice, HardNegatives, hard_negatives

__all__ = ["mine_hard_negatives"]

Format = Literal["triplet", "n-tuple", "labeled-pair", "labeled-list"]
FORMATS: tuple[Format, ...] = get_args(Format)
Columns = dict[str, list[Any]]


def mine_hard_negatives(
    dataset: Any,
    model: Any,
    anchor_column_name: str | None = None,
    positive_column_name: str | None = None,
    corpus: Sequence[str] | None = None,
    *,
    num_negatives: int = 3,
    output_format: Format = "triplet",
    output_scores: bool = False,
    include_positives: bool = False,
    batch_size: int = 32,
    query_prompt_name: str | None = None,
    query_prompt: str | None = None,
    corpus_prompt_name: str | None = None,
    corpus_prompt: str | None = None,
    **options: Any,
) -> Any:
    """Mine hard negatives for a dataset of (anchor, positive) texts, by exact MaxSim over all documents.

    This is for multi-vector models what Sentence Transformers' ``mine_hard_negatives`` is for models of one
    vector. It has the names, the rules and the rows of release 6.2, but no cross-encoder, FAISS or cache.

    Equal texts are one document, and equal anchors are one query, whose positives are those of all its rows.
    None of them becomes a negative. Each text is encoded once.

    Args:
        dataset: a ``datasets.Dataset``, or a dict of lists, with a row for each (anchor, positive).
        model: a ``MultiVectorEncoder`` of Sentence Transformers, or any object whose ``encode_query`` and
            ``encode_document`` take a list of strings and ``batch_size`` and return a ``[L, d]`` tensor or
            array for each.
        anchor_column_name, positive_column_name: the first and second column, by default.
        corpus: more documents, from which negatives may come, beside all positives.
        num_negatives: how many for each row.
        output_format: ``"triplet"``, ``"n-tuple"``, ``"labeled-pair"`` or ``"labeled-list"``.
        output_scores: a column of scores beside, or of scores instead of labels.
        include_positives: rank all documents, positives among them, as reranking datasets want it; the format
            is ``"n-tuple"`` then.
        batch_size: of the model.
        query_prompt_name, query_prompt, corpus_prompt_name, corpus_prompt: go to the model's
            ``encode_query`` and ``encode_document`` as ``prompt_name`` and ``prompt``.
        options: those of :func:`hard_negatives`: ``range_min``, ``range_max``, ``max_score``, ``min_score``,
            ``absolute_margin``, ``relative_margin``, ``sampling_strategy``, ``seed``, ``normalize``,
            ``progress``, ``keep_empty``.

    Returns:
        A dataset of the kind of ``dataset``, anchor by anchor in the order of their first rows, each with its
        positives:

        - ``"triplet"``: anchor, positive, ``negative``; a row for each negative;
        - ``"n-tuple"``: anchor, positive, ``negative_1`` to ``negative_n``; those with fewer are left out;
        - ``"labeled-pair"``: anchor, positive (any document), ``label`` 1 or 0; of an anchor first all
          positives, then all negatives;
        - ``"labeled-list"``: anchor, positive (a list of documents), ``labels``; those without a negative are
          left out.

        With ``output_scores`` triplets and tuples have ``scores``, that of the positive first; ``score`` and
        ``scores`` take the place of labels.

    Raises:
        TypeError, ValueError: arguments of a wrong kind or value; a dataset without two columns; columns for
            anchors and positives of one name, or of a name that the output has for another column.

    Complexity: as :func:`hard_negatives`; the embeddings of all texts stay in memory, which a
        :class:`late_interaction.Corpus` and :func:`hard_negatives` avoid.

    Example:
        >>> from late_interaction.mining import mine_hard_negatives
        >>> dataset = load_dataset("sentence-transformers/natural-questions", split="train")  # doctest: +SKIP
        >>> mined = mine_hard_negatives(dataset, model, absolute_margin=0.5)                  # doctest: +SKIP
        >>> mined.column_names                                                               # doctest: +SKIP
        ['query', 'answer', 'negative']
    """
    check_one_of("output_format", output_format, FORMATS)
    check_flag("output_scores", output_scores)
    check_flag("include_positives", include_positives)
    check_positive("batch_size", batch_size)
    beside = ("normalize", "progress", "keep_empty")
    Choice(num_negatives, **{name: x for name, x in options.items() if name not in beside})
    names, anchors, texts = _columns(dataset, anchor_column_name, positive_column_name)
    if include_positives:
        output_format = "n-tuple"
    keys = _keys(names, num_negatives, output_format, output_scores)
    if not anchors:
        return _dataset_like(dataset, {key: [] for key in keys})
    documents = list(dict.fromkeys([*texts, *_strings("corpus", [] if corpus is None else corpus)]))
    queries = list(dict.fromkeys(anchors))
    place = {text: i for i, text in enumerate(documents)}
    of_query: dict[str, dict[int, None]] = {query: {} for query in queries}
    for anchor, text in zip(anchors, texts, strict=True):
        of_query[anchor][place[text]] = None
    positives = [list(of_query[query]) for query in queries]
    of_queries = {"prompt_name": query_prompt_name, "prompt": query_prompt}
    of_corpus = {"prompt_name": corpus_prompt_name, "prompt": corpus_prompt}
    with torch.no_grad():
        Q = _encoded("encode_query", model, queries, batch_size, of_queries)
        D = _encoded("encode_document", model, documents, batch_size, of_corpus)
        options |= {"num_negatives": num_negatives, "include_positives": include_positives}
        found = hard_negatives(Q, D, positives, **options)
    rows = list(_rows(queries, documents, positives, found, output_format, output_scores))
    return _dataset_like(dataset, {key: [row[i] for row in rows] for i, key in enumerate(keys)})


def _dataset_like(dataset: Any, columns: Columns) -> Any:
    if isinstance(dataset, Mapping):
        return columns
    return importlib.import_module("datasets").Dataset.from_dict(columns)


def _keys(names: list[str], wanted: int, output_format: str, output_scores: bool) -> list[str]:
    """Return the names of the output's columns, once they are known to differ."""
    scores = ["scores"] if output_scores else []
    made = {
        "triplet": ["negative", *scores],
        "n-tuple": [*(f"negative_{i}" for i in range(1, wanted + 1)), *scores],
        "labeled-pair": ["score" if output_scores else "label"],
        "labeled-list": ["scores" if output_scores else "labels"],
    }[output_format]
    anchor, positive = names
    if anchor == positive:
        raise ValueError(f"dataset must have two columns, anchors and positives, got {anchor!r} for both")
    for name in names:
        if name in made:
            raise ValueError(
                f"dataset must have another name for its column {name!r}: the output has {', '.join(made)}"
            )
    return [*names, *made]


def _columns(
    dataset: Any, anchor: str | None, positive: str | None
) -> tuple[list[str], list[str], list[str]]:
    there = list(dataset) if isinstance(dataset, Mapping) else getattr(dataset, "column_names", None)
    if there is None:
        raise TypeError(f"dataset must be a datasets.Dataset or a dict of lists, got {abbreviate(dataset)}")
    if len(there) < 2:
        raise ValueError(f"dataset must have two columns, anchors and positives, got {there}")
    names = [there[0] if anchor is None else anchor, there[1] if positive is None else positive]
    for name in names:
        if not is_one_of(name, there):
            raise ValueError(f"dataset must have a column {name!r}, got {there}")
    found = [_strings(name, dataset[name]) for name in names]
    if len(found[0]) != len(found[1]):
        raise ValueError(
            f"dataset must have columns of one length, got {len(found[0])} and {len(found[1])} rows"
        )
    return names, found[0], found[1]


def _strings(name: str, texts: Any) -> list[str]:
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise TypeError(f"{name} must be a list of strings, got {abbreviate(texts)}")
    found: list[str] = []
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{i}] must be a string, got {type(text).__name__}")
        found.append(text)
    return found


def _encoded(
    method: str, model: Any, texts: list[str], batch_size: int, prompts: dict[str, str | None]
) -> list[Tensor]:
    encode = getattr(model, method, None)
    if encode is None:
        raise TypeError(f"model must have {method}, got {type(model).__name__}")
    given = {name: prompt for name, prompt in prompts.items() if prompt is not None}
    found = [torch.as_tensor(x) for x in encode(texts, batch_size=batch_size, **given)]
    if len(found) != len(texts) or any(x.dim() != 2 for x in found):
        raise ValueError(f"model.{method} must return [L, d] embeddings of each of {len(texts)} texts")
    return found


def _rows(
    queries: list[str], documents: list[str], positives: list[list[int]], found: HardNegatives,
    output_format: str, output_scores: bool,
) -> Iterator[list[Any]]:  # fmt: skip
    """Yield what was mined as rows of a dataset; scores that may not be wanted come last."""
    mined = found.positive_scores, found.indices.tolist(), found.scores.tolist()
    for query, own, own_scores, places, scores in zip(queries, positives, *mined, strict=True):
        right = [(documents[x], score) for x, score in zip(own, own_scores.tolist(), strict=True)]
        wrong = [(documents[x], score) for x, score in zip(places, scores, strict=True) if x >= 0]
        if output_format == "labeled-pair":
            yield from ([query, x, score if output_scores else 1] for x, score in right)
            yield from ([query, x, score if output_scores else 0] for x, score in wrong)
            continue
        texts = [x for x, _ in wrong]
        for text, score in right:
            every = [score, *(y for _, y in wrong)]
            if output_format == "triplet":
                yield from ([query, text, x, [score, y]] for x, y in wrong)
            elif output_format == "n-tuple" and len(texts) == len(places):
                yield [query, text, *texts, every]
            elif output_format == "labeled-list" and texts:
                yield [query, [text, *texts], every if output_scores else [1] + [0] * len(texts)]
