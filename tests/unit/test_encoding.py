"""Tensors travel as plain buffers: they survive the trip, and no tensor byte goes through
pickle."""

from __future__ import annotations

import gc
import mmap
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from rolepool.protocol import DataProto, encode
from rolepool.protocol.columns import same_value
from rolepool.protocol.encoding import make_private, tensor_bytes

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.complex64,
        torch.complex128,
    ),
]


def send(value: object) -> object:
    """What another process would get, with the buffers out of band and read-only, as Ray hands them
    out."""
    in_band, buffers = dump(value)
    read_only = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    return pickle.loads(in_band, buffers=read_only)  # noqa: S301


def dump(value: object) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def num_bytes(buffers: list[pickle.PickleBuffer]) -> int:
    return sum(buffer.raw().nbytes for buffer in buffers)


def trip(value: object) -> object:
    return send(encode(value)).decode()


def jagged(*lengths: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = [torch.arange(length).to(dtype) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (4, 3)], ids=str)
def test_every_dtype_survives_in_every_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = np.random.default_rng(0).integers(
        0, 2, size=(int(np.prod(shape)) * dtype.itemsize,), dtype=np.uint8
    )
    tensor = (
        torch.from_numpy(raw).view(dtype).reshape(shape)
        if raw.size
        else torch.empty(shape, dtype=dtype)
    )
    received = trip(tensor)
    assert received.dtype == dtype
    assert received.shape == tensor.shape
    assert np.array_equal(tensor_bytes(received), tensor_bytes(tensor))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(12)[::3],
        torch.arange(3).expand(4, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=["transposed", "strided", "expanded", "conjugated", "negated", "parameter", "with a graph"],
)
def test_tensors_in_unusual_layouts_arrive_with_their_values(tensor: torch.Tensor) -> None:
    received = trip(tensor)
    assert torch.equal(received, tensor.detach().resolve_conj().resolve_neg())
    assert received.is_contiguous()
    assert not received.requires_grad


@pytest.mark.parametrize(
    "tensor",
    [
        jagged(3, 0, 5),
        jagged(2, 1, dtype=torch.bfloat16),
        torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.zeros(1, dtype=torch.int64)),
        torch.nested.nested_tensor([torch.ones(3, 2), torch.zeros(1, 2)], layout=torch.jagged),
        torch.nested.nested_tensor(
            [torch.ones(3, 2), torch.zeros(1, 2)], layout=torch.jagged
        ).transpose(1, 2),
        torch.nested.narrow(
            torch.arange(20.0).reshape(4, 5),
            1,
            torch.tensor([0, 1, 0, 2]),
            torch.tensor([2, 3, 1, 3]),
            torch.jagged,
        ),
    ],
    ids=["ragged", "bf16", "no rows", "2-d rows", "transposed", "with holes"],
)
def test_jagged_tensors_survive(tensor: torch.Tensor) -> None:
    received = trip(tensor)
    assert received.layout == torch.jagged
    for row, expected in zip(received.unbind(), tensor.unbind(), strict=True):
        assert torch.equal(row, expected)


def test_jagged_columns_with_the_same_lengths_can_still_be_combined_on_the_other_side() -> None:
    ids = jagged(3, 1)
    columns = {"ids": ids, "doubled": ids * 2}
    received = trip(columns)
    assert same_value(received["ids"] + received["doubled"], ids + columns["doubled"])


def test_tensors_and_arrays_are_found_in_dicts_lists_tuples_and_object_arrays() -> None:
    objects = np.empty(2, dtype=object)
    objects[0], objects[1] = {"pixels": torch.ones(2, dtype=torch.bfloat16)}, [np.arange(3), "text"]
    value = {
        "a": (torch.zeros(2), [np.float32(2), None]),
        3: objects,
        "text": ["kept", {"as": "is"}],
    }
    assert same_value(trip(value), value)
    assert len(encode(value).buffers) == 3


def test_an_object_that_occurs_twice_is_sent_once_and_still_one_object() -> None:
    image = {"pixels": torch.ones(1000)}
    encoded = encode([image, image])
    assert len(encoded.buffers) == 1
    received = send(encoded).decode()
    assert received[0] is received[1]


def test_a_value_that_contains_itself_survives() -> None:
    loop: list[object] = [torch.ones(1)]
    loop.append(loop)
    received = trip(loop)
    assert received[1] is received


def test_objects_of_classes_that_only_this_process_knows_survive() -> None:
    class Local:
        pixels = torch.ones(1000)

    received = trip([Local()])
    assert torch.equal(received[0].pixels, torch.ones(1000))


@pytest.mark.parametrize("dtype", [np.float32, np.int64, bool, "U5", "datetime64[s]", "complex128"])
def test_numeric_arrays_go_out_of_band_and_may_be_written_to_on_arrival(dtype: str) -> None:
    array = np.zeros((3, 2), dtype=dtype)
    _, buffers = dump(encode({"a": array}))
    assert num_bytes(buffers) == array.nbytes
    received = trip({"a": array})["a"]
    assert received.dtype == array.dtype
    assert np.array_equal(received, array)
    assert received.flags.writeable


def test_a_batch_hands_over_all_its_tensor_bytes_out_of_band() -> None:
    data = DataProto.from_dict(
        {
            "ids": torch.zeros(64, 1000, dtype=torch.int64),
            "logits": torch.zeros(64, 1000, dtype=torch.bfloat16),
        },
        {"scores": np.zeros(64)},
        {"step": 3, "baseline": torch.zeros(5000)},
    )
    in_band, buffers = dump(data)
    assert len(in_band) < 2000
    assert num_bytes(buffers) == 64 * 1000 * (8 + 2) + 64 * 8 + 5000 * 4


def test_a_row_slice_carries_its_rows_only_and_is_not_copied_before_it_is_written() -> None:
    whole = DataProto.from_dict(
        {"x": torch.arange(100_000).reshape(1000, 100), "j": jagged(*range(1000))}
    )
    part = whole[10:20]
    in_band, buffers = dump(part)
    assert len(in_band) < 2000
    assert num_bytes(buffers) == 10 * 100 * 8 + sum(range(10, 20)) * 4 + 11 * 8
    encoded = encode(part.batch["x"])
    assert encoded.buffers[0].ctypes.data == whole.batch["x"][10].data_ptr()


def test_one_row_taken_as_an_item_does_not_carry_the_batch_either() -> None:
    data = DataProto.from_dict({"x": torch.zeros(1000, 100)})
    _, buffers = dump(data[3])
    assert num_bytes(buffers) == 400
    assert torch.equal(send(data[3]).batch["x"], data.batch["x"][3])


def test_received_tensors_are_writable_without_changing_the_buffers_they_came_in() -> None:
    tensor = torch.arange(100_000)
    in_band, buffers = dump(encode(tensor))
    shared = [bytes(buffer.raw()) for buffer in buffers]
    first, second = (pickle.loads(in_band, buffers=shared).decode() for _ in range(2))  # noqa: S301
    first.zero_()
    assert torch.equal(second, tensor)
    assert torch.equal(pickle.loads(in_band, buffers=shared).decode(), tensor)  # noqa: S301


def test_a_pickle_without_out_of_band_buffers_works_in_every_protocol() -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(5, dtype=torch.bfloat16)}, {"names": list("abcde")}
    )
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        received = pickle.loads(pickle.dumps(data, protocol=protocol))  # noqa: S301
        assert torch.equal(received.batch["x"], data.batch["x"])
        received.batch["x"].zero_()
        assert list(received.non_tensor_batch["names"]) == list("abcde")


def test_what_is_decoded_twice_is_two_values() -> None:
    encoded = pickle.loads(pickle.dumps(encode(torch.zeros(3))))  # noqa: S301
    first, second = encoded.decode(), encoded.decode()
    first.fill_(1)
    assert not second.any()


# --- copy-on-write, on shared memory of this process --------------------------------------------------------------


@pytest.fixture
def shared_file(tmp_path: Path) -> mmap.mmap:
    """A shared mapping of 4 MiB of counting bytes."""
    path = tmp_path / "memory"
    path.write_bytes(bytes(range(256)) * 16384)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def test_memory_that_can_be_mapped_again_is_read_in_place_and_written_in_private(
    shared_file: mmap.mmap, tmp_path: Path
) -> None:
    path = str(tmp_path / "memory")
    read_only = np.frombuffer(memoryview(shared_file).toreadonly(), np.uint8)
    parts = [
        read_only[100:1_200_000],
        read_only[1_200_000:1_200_100],
        read_only[1_600_001:3_600_000],
    ]
    views = [make_private(part, lambda memory: iter([path])) for part in parts]
    for view, part in zip(views, parts, strict=True):
        assert np.array_equal(view, part)
    assert [isinstance(view.base, np.ndarray) for view in views] == [True, False, True], (
        "a small part is copied"
    )

    before = bytes(shared_file)
    for view in views:
        view[:] = 7
    assert bytes(shared_file) == before
    assert all((view == 7).all() for view in views)


def test_mappings_and_descriptors_go_away_with_the_last_tensor(
    shared_file: mmap.mmap, tmp_path: Path
) -> None:
    path = str(tmp_path / "memory")
    read_only = np.frombuffer(memoryview(shared_file).toreadonly(), np.uint8)

    def view_of_file() -> torch.Tensor:
        return torch.from_numpy(make_private(read_only, lambda memory: iter([path])))

    def held() -> tuple[int, int]:
        gc.collect()
        return Path("/proc/self/maps").read_text().count(path), len(
            list(Path("/proc/self/fd").iterdir())
        )

    before = held()
    tensors = [view_of_file() for _ in range(5)]
    assert held() == (before[0] + 5, before[1] + 5)
    row = tensors[0][-10:]
    del tensors
    assert held() == (before[0] + 1, before[1] + 1), "a slice keeps its mapping"
    assert row[-1] == 255
    del row
    assert held() == before


def test_memory_that_cannot_be_mapped_again_is_copied(shared_file: mmap.mmap) -> None:
    read_only = np.frombuffer(memoryview(shared_file).toreadonly(), np.uint8)
    view = make_private(read_only, lambda memory: iter(["/nowhere"]))
    assert np.array_equal(view, read_only)
    view[:] = 0
    assert shared_file[255] == 255


def test_memory_that_is_not_shared_is_copied() -> None:
    memory = np.frombuffer(bytes(2_000_000), np.uint8)
    view = make_private(memory)
    view[:] = 1
    assert not memory.any()
