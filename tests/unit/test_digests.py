"""Digests: they change with every bit, and those of parts add up to that of the whole."""

from __future__ import annotations

import re
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from digests_by_hand import DTYPES, MASK, PLACES, ROWS, by_hand, factor, random_bits
from rolepool.weights.digests import CHUNK_WORDS, MAX_TABLE, Digest, Digests, digests_of, sum_of
from rolepool.weights.digests import _odd_numbers as odd_numbers
from rolepool.weights.regions import Region, whole_region

CPU = torch.device("cpu")
SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (1,),
    (7,),
    (4, 8),
    (5, 7),
    (3, 0),
    (0, 3),
    (3, 4, 5),
    (2, 3, 3),
)


def number_of(tensor: Tensor) -> int:
    return digests_of([("weight", tensor)])["weight"].number


def number_of_part(tensor: Tensor, region: Region) -> int:
    """The digest of a region of a tensor."""
    num_rows, num_columns = (last for _, last in whole_region(tensor.shape))
    matrix = tensor.reshape(num_rows, num_columns)
    digests = Digests()
    part = matrix[slice(*region.rows), slice(*region.columns)]
    digests.add_part("weight", part, region, tensor.shape)
    return digests.read()["weight"].number


def with_flipped_bit(tensor: Tensor, bit: int) -> Tensor:
    """A copy that differs in one bit of its bytes."""
    flat = tensor.clone().view(-1).view(torch.uint8)
    flat[bit // 8] ^= 1 << (bit % 8)
    return flat.view(tensor.dtype).view(tensor.shape)


def intervals(data: st.DataObject, size: int) -> list[tuple[int, int]]:
    """Random intervals that follow each other from 0 to `size`. Some may be empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    return list(zip([0, *cuts], [*cuts, size], strict=True))


def parts_of(data: st.DataObject, tensor: Tensor) -> Iterator[Region]:
    """A random division of a tensor into a grid of regions."""
    (_, num_rows), (_, num_columns) = whole_region(tensor.shape)
    all_columns = intervals(data, num_columns)
    for rows in intervals(data, num_rows):
        for columns in all_columns:
            yield Region(rows, columns)


# The number


def test_the_digest_of_a_small_tensor_is_this_sum() -> None:
    tensor = torch.tensor([[1, -2, 3], [4, 5, -6]], dtype=torch.int16)
    # Two 16-bit numbers in a word, the first one in its lower half, and zeros after the third.
    words = [[1 - 2 * 2**16, 3], [4 + 5 * 2**16, 2**16 - 6]]
    (word, next_word), (word_below, next_word_below) = words
    row, row_below = factor(ROWS, 0), factor(ROWS, 1)
    place, next_place = factor(PLACES, 0), factor(PLACES, 1)
    expected = row * (place * word + next_place * next_word)
    expected += row_below * (place * word_below + next_place * next_word_below)
    assert number_of(tensor) == expected % 2**64
    assert by_hand(tensor) == expected % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (700,), (130, 33), (9, 517), (300, 4)], ids=str)
def test_a_digest_is_the_weighted_sum_that_the_module_describes(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    tensor = random_bits(shape, dtype)
    assert digests_of([("weight", tensor)]) == {
        "weight": Digest(str(dtype).removeprefix("torch."), shape, by_hand(tensor))
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "rows_of_parts"),
    [
        (600, 2000, 37),
        (2, 3 * CHUNK_WORDS["cpu"] + 5, 1),
        (MAX_TABLE + 9, 1, MAX_TABLE // 3),
        (1, MAX_TABLE + 9, 1),
    ],
    ids=["many rows", "wide rows", "more rows than factors", "more places than factors"],
)
def test_large_tensors_are_added_up_in_chunks(
    dtype: torch.dtype, num_rows: int, num_columns: int, rows_of_parts: int
) -> None:
    """The sum that the module describes, at once and with other chunks."""
    torch.manual_seed(1)
    tensor = random_bits((num_rows, num_columns), dtype)
    units_per_word = 4 // dtype.itemsize
    padded = torch.zeros(num_rows, -(-num_columns // units_per_word) * units_per_word, dtype=dtype)
    padded[:, :num_columns] = tensor
    words = padded.view(torch.int32).long()
    row_factors = odd_numbers(ROWS, 0, num_rows, CPU)
    place_factors = odd_numbers(PLACES, 0, words.shape[1], CPU)
    expected = int((words * place_factors * row_factors[:, None]).sum()) % 2**64
    assert number_of(tensor) == expected

    digests = Digests()
    for first in range(0, num_rows, rows_of_parts):
        part = tensor[first : first + rows_of_parts]
        region = Region((first, first + len(part)), (0, num_columns))
        digests.add_part("weight", part, region, tensor.shape)
    assert digests.read()["weight"].number == expected


def test_factors_are_odd_and_do_not_depend_on_the_version_of_torch() -> None:
    """The process of vLLM has another torch. These are the numbers of splitmix64."""
    for seed in (PLACES, ROWS):
        factors = [number & MASK for number in odd_numbers(seed, 5, 20, CPU).tolist()]
        assert factors == [factor(seed, index) for index in range(5, 25)]
        assert {number % 2 for number in factors} == {1}


# What changes it


@settings(deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=st.sampled_from(SHAPES))
def test_every_flipped_bit_changes_the_digest(
    data: st.DataObject, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 999)))
    tensor = random_bits(shape, dtype)
    num_bits = 8 * tensor.nbytes
    if num_bits and dtype != torch.bool:  # other bits of a bool are not a value
        bit = data.draw(st.integers(0, num_bits - 1))
        assert number_of(with_flipped_bit(tensor, bit)) != number_of(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(64,), (64, 33), (64, 3, 4)], ids=str)
def test_rows_in_the_wrong_place_change_the_digest(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    tensor = random_bits(shape, dtype)
    before = number_of(tensor)
    orders = {before}
    for row in range(1, len(tensor)):
        swapped = tensor.clone()
        swapped[[0, row]] = tensor[[row, 0]]
        orders.add(number_of(swapped))
    assert len(orders) == len(tensor)
    assert number_of(tensor.roll(1, dims=0)) not in orders


def test_the_place_of_a_part_changes_its_digest() -> None:
    """An engine rank that holds the rows of another rank is found."""
    tensor = torch.randn(8, 6)
    top = Region((0, 4), (0, 6))
    digests = Digests()
    digests.add_part("weight", tensor[4:], top, tensor.shape)
    assert digests.read()["weight"].number != number_of_part(tensor, top)
    assert digests.read()["weight"].number != number_of_part(tensor, Region((4, 8), (0, 6)))


def test_two_signs_that_change_and_two_numbers_that_change_places_are_found() -> None:
    """With 64-bit words, two flips of the highest bit would cancel each other."""
    tensor = torch.randn(10, 6)
    before = number_of(tensor)
    for first, second in (((0, 1), (0, 3)), ((1, 2), (7, 2)), ((1, 2), (7, 5))):
        signs = tensor.clone()
        places = tensor.clone()
        for place, other in ((first, second), (second, first)):
            signs[place] *= -1
            places[place] = tensor[other]
        assert len({before, number_of(signs), number_of(places)}) == 3


# Parts


@settings(deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=st.sampled_from(SHAPES))
def test_the_digests_of_parts_add_up_to_that_of_the_whole(
    data: st.DataObject, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Whoever adds them: one side that has several parts, or the driver."""
    torch.manual_seed(data.draw(st.integers(0, 999)))
    tensor = random_bits(shape, dtype)
    num_rows, num_columns = (last for _, last in whole_region(shape))
    matrix = tensor.reshape(num_rows, num_columns)
    together = Digests()
    receipts: list[dict[str, Digest]] = []
    for region in parts_of(data, tensor):
        part = matrix[slice(*region.rows), slice(*region.columns)]
        together.add_part("weight", part, region, shape)
        alone = Digests()
        # A copy lies elsewhere in memory than a view.
        alone.add_part("weight", part.clone(), region, shape)
        receipts.append(alone.read())
    whole = digests_of([("weight", tensor)])
    assert together.read() == whole
    assert sum_of(receipts) == whole


@pytest.mark.parametrize("word", [-1, -(2**31), 2**31 - 1, 0x7FFF8000, -0x8000, 0x80, -0x7F7F7F80])
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8], ids=str)
def test_a_word_that_two_parts_share_is_the_sum_of_theirs(dtype: torch.dtype, word: int) -> None:
    """A lower half without a sign and an upper one with it."""
    tensor = torch.frombuffer(bytearray(struct.pack("<i", word)), dtype=dtype)[None]
    num_columns = tensor.shape[1]
    expected = word * factor(ROWS, 0) * factor(PLACES, 0) % 2**64
    assert number_of(tensor) == expected
    for cut in range(1, num_columns):
        lower = number_of_part(tensor, Region((0, 1), (0, cut)))
        upper = number_of_part(tensor, Region((0, 1), (cut, num_columns)))
        assert (lower + upper) % 2**64 == expected


def test_parts_that_do_not_fit_are_an_error_with_the_name() -> None:
    digests = Digests()
    part = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"^norm: rows and columns .* not a part of \[4, 3\]$"):
        digests.add_part("norm", part, Region((3, 5), (0, 3)), (4, 3))
    with pytest.raises(ValueError, match=r"^head: a part of shape \[2, 3\] .* 9 elements$"):
        digests.add_part("head", part, Region((0, 3), (0, 3)), (4, 3))
    assert digests.read() == {}
    digests.add_part("head", part, Region((0, 2), (0, 3)), (4, 3))
    with pytest.raises(ValueError, match="head: one part is of bfloat16"):
        digests.add_part("head", part.bfloat16(), Region((2, 4), (0, 3)), (4, 3))
    with pytest.raises(ValueError, match=r"head: one part is of float32 \[5, 3\]"):
        sum_of([digests.read(), {"head": Digest("float32", (5, 3), 1)}])


def test_a_sum_of_receipts_has_every_name_of_any_of_them() -> None:
    of_a_bias, of_a_weight = Digest("float32", (2,), 7), Digest("float32", (2, 2), 2**64 - 1)
    both = {"bias": of_a_bias, "weight": of_a_weight}
    assert sum_of([both, {"weight": of_a_weight}]) == {
        "bias": of_a_bias,
        "weight": Digest("float32", (2, 2), 2**64 - 2),
    }
    assert sum_of([]) == {}


def test_a_tensor_that_is_added_again_replaces_what_was_there() -> None:
    digests = Digests()
    digests.add("weight", torch.randn(3))
    digests.add("weight", torch.ones(2, 2))
    assert digests.read() == digests_of([("weight", torch.ones(2, 2))])


def test_the_example_of_the_engines_page_is_right(root: Path) -> None:
    page = (root / "docs" / "engines.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import torch\n[^`]*add_part[^`]*)```", page)
    exec(code, {})  # it is our own page, and ends with an assertion


# Where tensors lie


def test_a_view_has_the_digest_of_a_copy() -> None:
    for dtype in DTYPES:
        whole = random_bits((9, 8), dtype)
        flat = whole.view(-1)
        views = (whole[:, 2:5], whole.T, whole[1:], flat[1:], whole[:, ::2], whole.T[:, :1])
        for view in views:
            assert number_of(view) == number_of(view.clone())
        column = whole[:, 1]
        assert number_of(column.expand(3, 9)) == number_of(column.repeat(3, 1))


def test_words_that_begin_anywhere_in_memory_are_read() -> None:
    content = bytearray(range(64))
    for offset in range(4):
        tensor = torch.frombuffer(content, dtype=torch.uint8, offset=offset, count=48).view(6, 8)
        assert number_of(tensor) == by_hand(tensor)


def test_digests_can_be_computed_inside_and_outside_of_inference_mode() -> None:
    """vLLM computes in inference mode, and memory that is used again was allocated there."""
    tensor = torch.randn(400, 101).bfloat16()  # needs memory for padding, words and sums
    expected = by_hand(tensor)
    numbers: list[int] = []

    def inside_and_outside() -> None:
        with torch.inference_mode():
            numbers.append(number_of(tensor))
        numbers.append(number_of(tensor))

    thread = threading.Thread(target=inside_and_outside)  # has no memory from other tests
    thread.start()
    thread.join(timeout=60)
    assert numbers == [expected, expected]


def test_threads_do_not_disturb_each_other() -> None:
    tensors = [torch.randn(4000, 601).bfloat16() for _ in range(4)]
    expected = [number_of(tensor) for tensor in tensors]

    def numbers_of(tensor: Tensor) -> set[int]:
        return {number_of(tensor) for _ in range(25)}

    with ThreadPoolExecutor(max_workers=len(tensors)) as threads:
        futures = [threads.submit(numbers_of, tensor) for tensor in tensors]
        numbers = [future.result(timeout=120) for future in futures]
    assert numbers == [{number} for number in expected]


def test_the_module_can_be_loaded_without_rolepool(
    python: Callable[..., subprocess.CompletedProcess[str]], root: Path
) -> None:
    """The process of vLLM loads it by its path."""
    file = root / "src" / "rolepool" / "weights" / "digests.py"
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("alone", {str(file)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import torch
part = torch.arange(6).view(2, 3)
digests = module.Digests()
digests.add_part("weight", part, ((1, 3), (0, 3)), (4, 3))
print(digests.read()["weight"].number, "rolepool" in sys.modules)
"""
    ended = python("-c", program)
    assert ended.returncode == 0, ended.stderr
    # Its rows 1 and 2 are the numbers 0 to 5.
    whole = torch.arange(-3, 9).view(4, 3)
    expected = number_of_part(whole, Region((1, 3), (0, 3)))
    assert ended.stdout.split() == [str(expected), "False"]


def test_digests_are_plain_data_and_compare_as_such() -> None:
    digest = digests_of([("a", torch.ones(2, 3))])["a"]
    assert Digest(*tuple(digest)) == digest
    assert digest[:2] == ("float32", (2, 3))


# Regions


def test_the_region_of_a_whole_weight_is_its_matrix() -> None:
    assert whole_region(()) == Region((0, 1), (0, 1))
    assert whole_region((5,)) == Region((0, 5), (0, 1))
    assert whole_region((5, 2, 3)) == Region((0, 5), (0, 6))
    assert whole_region(torch.Size((2, 0))).num_elements == 0


def test_regions_overlap_in_what_both_have() -> None:
    region = Region((2, 6), (0, 4))
    assert region.overlap(Region((4, 9), (3, 8))) == Region((4, 6), (3, 4))
    assert region.overlap(region) == region
    assert region.overlap(Region((6, 9), (0, 4))) is None
    assert region.overlap(Region((0, 9), (4, 4))) is None
    assert Region((3, 3), (0, 4)).num_elements == 0
    assert region.num_elements == 16


@settings(deadline=None)
@given(data=st.data())
def test_the_overlaps_of_two_divisions_have_every_element_once(data: st.DataObject) -> None:
    tensor = torch.zeros(7, 5)
    divided = list(parts_of(data, tensor))
    divided_otherwise = list(parts_of(data, tensor))
    for one in divided:
        for other in divided_otherwise:
            common = one.overlap(other)
            assert common == other.overlap(one)
            if common is not None:
                tensor[slice(*common.rows), slice(*common.columns)] += 1
    assert (tensor == 1).all()
