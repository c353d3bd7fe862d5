"""What was computed for conversations, between their turns: some slots of the cache keep it.

Owns which slot keeps which conversation, and which tokens are in it. Does not know how slots are
read, nor which requests run.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rolepool.rollout.kv_cache import SlotCache


class _KeptTurn(NamedTuple):
    """Where the tokens of a conversation are between its turns."""

    slot: int
    token_ids: npt.NDArray[np.int64]


class ConversationCache:
    """Keeps the tokens of conversations in `slots` of `cache`, which nothing else uses."""

    def __init__(self, cache: SlotCache, slots: Iterable[int]) -> None:
        self._cache = cache
        self._free_slots = list(slots)
        self._kept: dict[int, _KeptTurn] = {}
        """By conversation; the one that was kept first comes first."""

    def num_kept(self, conversation: int | None, token_ids: npt.NDArray[np.int64]) -> int:
        """The number of tokens at the beginning of `token_ids` that are kept. The last one never
        counts, because at least one token must be run."""
        if conversation is None or conversation not in self._kept:
            return 0
        kept_ids = self._kept[conversation].token_ids
        ids_before_last = token_ids[:-1]
        num_compared = min(len(ids_before_last), len(kept_ids))
        is_different = ids_before_last[:num_compared] != kept_ids[:num_compared]
        differences = np.flatnonzero(is_different)
        if len(differences) > 0:
            return int(differences[0])
        return num_compared

    def restore(self, conversation: int, slot: int, num_tokens: int) -> None:
        """Copy the first tokens of a kept conversation into a slot."""
        source = self._kept[conversation].slot
        self._cache.copy(source, slot, num_tokens)

    def keep(
        self,
        conversation: int,
        slot: int,
        token_ids: npt.NDArray[np.int64],
    ) -> None:
        """Keep the tokens that are in `slot`: where this conversation was kept before, in a free
        slot, or in place of the conversation that was kept first."""
        if conversation in self._kept:
            target = self._kept.pop(conversation).slot
        elif self._free_slots:
            target = self._free_slots.pop()
        elif self._kept:
            oldest = next(iter(self._kept))
            target = self._kept.pop(oldest).slot
        else:
            return
        self._cache.copy(slot, target, len(token_ids))
        self._kept[conversation] = _KeptTurn(target, token_ids)
