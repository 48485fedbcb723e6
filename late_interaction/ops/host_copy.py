"""The operator that copies from pageable memory to a GPU, through a ring of pinned memory.

``send_bytes_(to, source, staging, events, first)``
    Copies the bytes of ``source`` on the current stream by way of the slots of ``staging``, from slot
    ``first`` on; event ``events[i]`` is recorded once slot ``i`` is free again. ``source`` may change after
    the call.
"""

from typing import Any

import torch

from late_interaction.ops._library import qualified


def _fake(*_: Any) -> None:
    """Writes into ``to`` and returns nothing."""


def register() -> None:
    torch.library.register_fake(qualified("send_bytes_"), _fake)
