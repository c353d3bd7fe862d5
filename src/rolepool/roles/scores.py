"""A score of a whole response as rewards of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def at_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """[rows, response]: each row's score at the last token of its response, zero elsewhere."""
    places = torch.arange(response_mask.shape[1])
    last = torch.where(response_mask.bool(), places, -1).amax(dim=1, keepdim=True)
    return torch.where((places == last) & (last >= 0), scores.unsqueeze(1), 0.0).to(scores.dtype)
