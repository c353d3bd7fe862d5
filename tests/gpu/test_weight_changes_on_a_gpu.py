"""What changed in a weight is found and written on a GPU as on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolepool.weights.changes import (
    apply_changes,
    differences,
    encoded_bytes,
    find_changes,
    is_sent_whole,
    places_of_changes,
)
from rolepool.weights.regions import Region
from rolepool.weights.routes import Piece, Weight

pytestmark = pytest.mark.gpu

SHAPE = (300, 500)


def changed(old: Tensor, share: float) -> Tensor:
    new = old.clone()
    is_changed = torch.rand(old.shape) < share
    new[is_changed] = -new[is_changed]
    return new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5])
@pytest.mark.parametrize("columns", [(0, 500), (100, 301)], ids=str)
def test_a_gpu_finds_and_writes_the_changes_of_a_cpu(
    dtype: torch.dtype, share: float, columns: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    old = torch.randn(SHAPE).to(dtype)
    new = changed(old, share)
    name = str(dtype).removeprefix("torch.")
    weight = Weight("weight", SHAPE, name, dtype.itemsize, is_sharded=True)
    piece = Piece(weight, Region((0, SHAPE[0]), columns))
    place = slice(*columns)
    found = {}
    for device in ("cpu", "cuda"):
        part, before = (one.to(device)[:, place] for one in (new, old))
        found[device] = find_changes({piece: (part, differences(part, before))})
    assert found["cuda"][0] == found["cpu"][0]
    assert found["cuda"][1].keys() == found["cpu"][1].keys()
    count = found["cuda"][0][piece]
    if count == 0 or is_sent_whole(piece, count):
        return
    changes = found["cuda"][1][piece]
    for here, there in zip(changes, found["cpu"][1][piece], strict=True):
        assert torch.equal(here.cpu(), there)
    content = torch.empty(encoded_bytes(piece, count), dtype=torch.uint8, device="cuda")
    torch._foreach_copy_(list(places_of_changes(content, count, dtype)), list(changes))
    target = old.cuda()
    apply_changes(target[:, place], places_of_changes(content, count, dtype))
    expected = old.clone()
    expected[:, place] = new[:, place]
    assert torch.equal(target.cpu(), expected)
