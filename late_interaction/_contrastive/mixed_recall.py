"""The surrogate of recall@k over a batch and its virtual queries and documents."""

from dataclasses import replace

from torch import Tensor

from late_interaction._contrastive.call import Call
from late_interaction._contrastive.mixup import Mixup
from late_interaction._contrastive.row_losses import Panel, Recall


class MixedRecall(Recall):
    """:class:`Recall`, with a row for each virtual query behind those of the queries.

    A panel is mixed when it comes, as its groups are whole. Virtual queries have no hard negatives.
    """

    def __init__(self, call: Call, sums: dict[str, Tensor]) -> None:
        super().__init__(_with_mixes(call), sums)

    @classmethod
    def of(cls, call: Call, positives: Tensor) -> "MixedRecall":
        call = _with_mixes(call)
        return cls(call, cls.empty(call, _mixup(call).positives(positives)))

    def add(self, panel: Panel) -> None:
        super().add(panel)
        if panel.labels is not None:  # else hard negatives, which are not mixed
            mixed = self._of_mixed_rows(panel)
            for part in (self._of_mixed_columns(panel), mixed, self._of_mixed_columns(mixed)):
                super().add(part)

    def derivatives(self, panel: Panel) -> Tensor:
        if panel.labels is None:
            return super().derivatives(panel)
        found = self._over_columns(panel)
        mixed = self._over_columns(self._of_mixed_rows(panel))
        _mixup(self.call).queries.add_back(found.t(), mixed.t(), panel.rows)
        return found

    def _over_columns(self, panel: Panel) -> Tensor:
        """Return the gradient with respect to a panel's logits, through documents and their mixes."""
        found = super().derivatives(panel)
        mixed = super().derivatives(self._of_mixed_columns(panel))
        _mixup(self.call).documents.add_back(found, mixed, panel.columns)
        return found

    def _of_mixed_rows(self, panel: Panel) -> Panel:
        queries = _mixup(self.call).queries
        logits = queries.mix(panel.logits.t(), panel.rows).t()
        return replace(panel, logits=logits, rows=queries.numbers(panel.rows))

    def _of_mixed_columns(self, panel: Panel) -> Panel:
        documents = _mixup(self.call).documents
        logits = documents.mix(panel.logits, panel.columns)
        return replace(panel, logits=logits, columns=documents.numbers(panel.columns))


def _mixup(call: Call) -> Mixup:
    assert call.mixup is not None
    return call.mixup


def _with_mixes(call: Call) -> Call:
    return replace(call, labels=_mixup(call).labels)
