"""Digests on a real GPU, with the Triton kernel and without it, are those of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from digests_by_hand import DTYPES, by_hand, random_bits
from rolepool.weights import digests as digests_module
from rolepool.weights.digests import MAX_TABLE, Digest, Digests, digests_of
from rolepool.weights.regions import Region, whole_region

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (1,),
    (701,),
    (4, 8),
    (5, 7),
    (3, 0),
    (130, 33),
    (9, 517),
    (300, 257),
    (70, 1030),
    (3, 4, 5),
    (129, 3, 343),
)


def on_gpu(tensor: Tensor, uses_triton: bool) -> Digest:
    digests = Digests(uses_triton)
    digests.add("weight", tensor)
    return digests.read()["weight"]


def on_cpu(tensor: Tensor) -> Digest:
    return digests_of([("weight", tensor.cpu())])["weight"]


@pytest.fixture(autouse=True)
def has_kernels() -> None:
    """Otherwise both ways would be the same."""
    assert digests_module._kernels() is not None


@pytest.mark.parametrize("uses_triton", [True, False], ids=["triton", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_on_a_gpu_is_that_on_a_cpu(dtype: torch.dtype, uses_triton: bool) -> None:
    torch.manual_seed(1)
    for shape in SHAPES:
        tensor = random_bits(shape, dtype)
        digest = on_gpu(tensor.to(GPU), uses_triton)
        assert digest == on_cpu(tensor), shape
        assert digest.number == by_hand(tensor), shape


@pytest.mark.parametrize("uses_triton", [True, False], ids=["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(3000, 4099), (151_936, 64), (MAX_TABLE + 9,), (2, 4 * MAX_TABLE + 9), (5000, 4096)],
    ids=str,
)
def test_large_tensors_have_the_digest_of_the_cpu(
    shape: tuple[int, ...], dtype: torch.dtype, uses_triton: bool
) -> None:
    torch.manual_seed(1)
    tensor = random_bits(shape, dtype)
    assert on_gpu(tensor.to(GPU), uses_triton) == on_cpu(tensor)


@pytest.mark.parametrize("uses_triton", [True, False], ids=["triton", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_on_a_gpu_add_up_to_the_whole(dtype: torch.dtype, uses_triton: bool) -> None:
    """Views of a larger tensor, which begin and end anywhere in a word, and copies of them."""
    torch.manual_seed(1)
    tensor = random_bits((70, 1030), dtype)
    expected = on_cpu(tensor)
    whole = tensor.to(GPU)
    for copies in (False, True):
        digests = Digests(uses_triton)
        for rows in ((0, 1), (1, 33), (33, 33), (33, 70)):
            for columns in ((0, 2), (2, 5), (5, 513), (513, 1030)):
                part = whole[slice(*rows), slice(*columns)]
                part = part.clone() if copies else part
                digests.add_part("weight", part, Region(rows, columns), whole.shape)
        assert digests.read()["weight"] == expected


def test_parts_of_both_devices_add_up_to_the_whole() -> None:
    tensor = torch.randn(64, 48).bfloat16()
    digests = Digests()
    digests.add_part("weight", tensor[:, :24].to(GPU), Region((0, 64), (0, 24)), tensor.shape)
    digests.add_part("weight", tensor[:, 24:], Region((0, 64), (24, 48)), tensor.shape)
    assert digests.read()["weight"] == on_cpu(tensor)


@pytest.mark.parametrize("uses_triton", [True, False], ids=["triton", "torch"])
def test_a_tensor_of_the_cpu_is_copied_in_chunks(uses_triton: bool) -> None:
    tensor = torch.randn(12_000, 4096).bfloat16()  # 98 MB
    on_cpu_digest = on_cpu(tensor)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    digests = Digests(uses_triton)
    digests.add("weight", tensor, GPU)
    assert digests.read()["weight"] == on_cpu_digest
    assert torch.cuda.max_memory_allocated() - before_bytes < 96 * 2**20


def test_a_column_part_is_read_where_it_lies() -> None:
    """No copy of the part is allocated."""
    whole = torch.randn(8192, 8192, device=GPU).bfloat16()
    region = Region((0, 8192), (1, 4096))  # it begins within a word
    part = whole[:, 1:4096]
    digests = Digests()
    digests.add_part("weight", part, region, whole.shape)
    digests.read()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    digests.add_part("weight", part, region, whole.shape)
    digests.read()
    assert torch.cuda.max_memory_allocated() - before_bytes < 2**20
    assert whole_region(whole.shape).overlap(region) == region


def test_one_flipped_bit_changes_the_digest() -> None:
    whole = torch.zeros(300, 1500, device=GPU)
    numbers = {on_gpu(whole, uses_triton=True).number}
    words = whole.view(torch.int32)
    for bit in (0, 15, 31):
        for row, column in ((0, 0), (0, 1499), (299, 0), (150, 1024)):
            words[row, column] ^= torch.tensor(-(2**31) if bit == 31 else 1 << bit)
            numbers.add(on_gpu(whole, uses_triton=True).number)
            words[row, column] = 0
    assert len(numbers) == 13
