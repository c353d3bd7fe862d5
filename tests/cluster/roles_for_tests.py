"""Roles that tests put into pools. Worker processes import this module."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import ray
import torch
import torch.distributed as dist

from rolepool.errors import ConfigError
from rolepool.protocol import DataProto, Dispatch, Execute, Worker, register


class Critic(Worker):
    """The example of the documentation: an update that takes a while."""

    def __init__(self, bias: float = 1.0) -> None:
        self.bias = bias

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update_critic(self, data: DataProto) -> DataProto:
        time.sleep(1.0)
        return DataProto.from_dict(
            {"values": data.batch["x"] + self.bias}, meta_info={"metrics": {"rank": self.rank}}
        )


class Actor(Worker):
    """The other half of the example."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update_actor(self, data: DataProto) -> DataProto:
        time.sleep(1.0)
        return DataProto.from_dict({"log_probs": data.batch["x"] * 2})


def lists_per_rank(
    group: Any, data: DataProto, *, factor: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rank r gets row r of the batch and the factor times r."""
    return ([data[r : r + 1] for r in range(group.world_size)],), {
        "factor": [factor * r for r in range(group.world_size)]
    }


def sum_of_results(group: Any, results: list[int]) -> dict[str, int]:
    return {"ranks": group.world_size, "sum": sum(results)}


class Everything(Worker):
    """A method for every mode. Each says which rank ran, and what it was given."""

    def __init__(self) -> None:
        self.seen: Any = None
        self.log: list[str] = []

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, *args: Any, **kwargs: Any) -> Any:
        return self.rank, args, kwargs

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, *args: Any, **kwargs: Any) -> Any:
        return self.rank, args, kwargs

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def zeros(self, num_rows: int) -> DataProto:
        return DataProto.from_dict({"zeros": torch.zeros(num_rows, 1024)})

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def all_to_all(self, *args: Any, **kwargs: Any) -> Any:
        return self.rank, args, kwargs

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, *args: Any, **kwargs: Any) -> Any:
        return self.rank, args, kwargs

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def dp_compute_proto(self, data: DataProto, factor: int = 1) -> DataProto:
        self.seen = data.batch["x"].tolist()
        rank = torch.full((len(data),), self.rank)
        return DataProto.from_dict(
            {"y": data.batch["x"] * factor, "rank": rank}, {"text": data.non_tensor_batch["text"]}
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def dp_compute_metric(self, data: DataProto) -> dict[str, Any]:
        self.seen = data.batch["x"].tolist()
        return {"rank": self.rank, "sum": data.batch["x"].sum().item()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def one_to_all_on_zero(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def all_to_all_on_zero(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE, execute_mode=Execute.RANK_ZERO)
    def dp_compute_on_zero(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)
    def dp_compute_proto_on_zero(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(
            {"y": data.batch["x"], "rank": torch.full((len(data),), self.rank)}
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, execute_mode=Execute.RANK_ZERO)
    def dp_compute_metric_on_zero(self, data: DataProto) -> Any:
        return self.rank, data.batch["x"].tolist()

    @register(
        dispatch_mode={"dispatch_fn": lists_per_rank, "collect_fn": sum_of_results}, blocking=False
    )
    def custom(self, data: DataProto, factor: int) -> int:
        assert len(data) == 1
        return int(data.batch["x"][0]) * factor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_seen(self) -> Any:
        return self.context.rank, self.context.dp_rank, self.context.tp_rank, self.seen

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def slow_coroutine(self, name: str) -> str:
        await asyncio.gather(asyncio.sleep(0.3), asyncio.sleep(0.3))
        self.log.append(name)
        return f"{name} on {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def quick(self, name: str) -> str:
        self.log.append(name)
        return f"{name} on {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def names_in_order(self) -> list[str]:
        return self.log

    def not_registered(self) -> None:
        """Nobody outside the process can call this."""


class Network(Worker):
    """A role with weights, random numbers, and a process to look into."""

    def __init__(self) -> None:
        self.weights = torch.randn(4, 4)
        self.numpy_weights = np.random.standard_normal(3)
        self.python_weight = random.random()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initial(self) -> tuple[list[float], list[float], float]:
        return self.weights.flatten().tolist(), self.numpy_weights.tolist(), self.python_weight

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def draw(self) -> tuple[float, float, float]:
        return torch.rand(1, dtype=torch.float64).item(), float(np.random.random()), random.random()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> dict[str, Any]:
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        )
        return {
            "pid": os.getpid(),
            "process_group": id(dist.group.WORLD),
            "backend": dist.get_backend(),
            "rank": (dist.get_rank(), dist.get_world_size()),
            "threads": torch.get_num_threads(),
            "omp": os.environ.get("OMP_WAIT_POLICY"),
            "environment": {name: os.environ.get(name) for name in names},
            "context": self.context,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def all_reduce_rank(self) -> float:
        total = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(total)
        return total.item()


class Counter(Worker):
    """Returns everything a rank can make of the rows it was given; weighs rows by their masks."""

    def __init__(self) -> None:
        self.received: dict[str, Any] = {}

    def _note(self, data: DataProto) -> None:
        self.received = {
            **{key: tensor.tolist() for key, tensor in data.batch.items()},
            **{key: array.tolist() for key, array in data.non_tensor_batch.items()},
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def what_was_received(self) -> dict[str, Any]:
        return self.received

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def as_batch(self, data: DataProto) -> DataProto:
        self._note(data)
        return DataProto.from_dict(
            {"y": data.batch["x"] + 100}, {"text": data.non_tensor_batch["text"]}
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def unchanged(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def as_list(self, data: DataProto) -> list[str]:
        return [f"{text}!" for text in data.non_tensor_batch["text"]]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def as_tensor(self, data: DataProto) -> torch.Tensor:
        return data.batch["x"] + 100

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def repeated(self, data: DataProto, times: int) -> DataProto:
        return data.repeat(times)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def repeated_list(self, data: DataProto, times: int) -> list[str]:
        return [f"{text} {i}" for text in data.non_tensor_batch["text"] for i in range(times)]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def masked_sums(self, data: DataProto) -> dict[str, float]:
        self._note(data)
        mask = data.batch["response_mask"].double()
        sums = torch.stack(
            [
                mask.sum(),
                (mask * data.batch["reward"]).sum(),
                data.batch["loss_weights"].double().sum(),
            ]
        )
        dist.all_reduce(sums)
        return {"tokens": sums[0].item(), "reward": sums[1].item(), "weight": sums[2].item()}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric_vector(self, data: DataProto) -> list[float]:
        return [float(self.rank), 0.5]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def loss_and_count(self, data: DataProto) -> tuple[float, float]:
        return float(self.rank), 0.5

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self, data: DataProto, weights: list[float]) -> DataProto:
        """A gradient over all ranks' rows: masked sum over masked count."""
        weight = torch.tensor(weights, dtype=torch.float64, requires_grad=True)
        mask = data.batch["response_mask"].double()
        loss = (mask * (data.batch["reward"] - weight).square()).sum()
        loss.backward()
        total = torch.cat([weight.grad, mask.sum()[None]])
        dist.all_reduce(total)
        return DataProto(meta_info={"metrics": {"grad": (total[:-1] / total[-1]).tolist()}})


class Sleeper(Worker):
    """Work whose time is known: it sleeps, so that two of them do not compete for a core."""

    def __init__(self) -> None:
        self.log: list[int] = []
        self.weights = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add(self, data: DataProto, amount: int, seconds: float = 0.0) -> DataProto:
        time.sleep(seconds)
        return DataProto.from_dict({"x": data.batch["x"] + amount})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def multiply(self, data: DataProto, factor: int, seconds: float = 0.0) -> DataProto:
        time.sleep(seconds)
        return DataProto.from_dict({"x": data.batch["x"] * factor})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def write_down(self, number: int, seconds: float = 0.0) -> int:
        time.sleep(seconds)
        self.log.append(number)
        return number

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def written_down(self) -> list[int]:
        return self.log

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def update(self, seconds: float) -> int:
        """Several steps with a collective after each, as a training step has."""
        for _ in range(5):
            time.sleep(seconds / 5)
            step = torch.ones(1)
            dist.all_reduce(step)
            self.weights += int(step)
        return self.weights


_fetched: list[int] = []
"""Sizes of the objects that this process asked Ray for."""


def favourite_key(role: type[Shelf], favourite: str = "a") -> list[str]:
    return [favourite]


class Shelf(Worker):
    """Makes large columns, reads some of them, writes over what it is given, and counts what it
    fetches. `favourite` is the only key that one of its methods reads."""

    def __init__(self, favourite: str = "a") -> None:
        self.favourite = favourite
        self.made: DataProto | None = None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, data: DataProto, width: int) -> DataProto:
        """Columns of `width` numbers in each row, which start with the row's id."""
        wide = data.batch["id"].double()[:, None] + torch.arange(width)
        tensors = {"id": data.batch["id"], "a": wide, "b": -wide, "c": wide * 2}
        self.made = DataProto.from_dict(
            tensors, {"text": [f"row {i}" for i in data.batch["id"].tolist()]}
        )
        return self.made

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def spoil_what_was_made(self) -> None:
        assert self.made is not None
        for tensor in self.made.batch.values():
            tensor.zero_()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def unchanged(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_one(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({key: tensor + 1 for key, tensor in data.batch.items()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, reads=["a", "id"])
    def read_a(self, data: DataProto) -> dict[str, Any]:
        return described(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def read_all(self, data: DataProto) -> dict[str, Any]:
        return described(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, reads=favourite_key)
    def read_favourite(self, data: DataProto) -> list[str]:
        return sorted(data.columns())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, reads=["a"])
    def read_a_of_all_rows(self, data: DataProto) -> dict[str, Any]:
        return described(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def overwrite(self, data: DataProto) -> int:
        """Write to every tensor that was received, and see that it holds."""
        for tensor in data.batch.values():
            tensor.fill_(77)
            assert (tensor == 77).all()
        data.non_tensor_batch["text"][:] = "spoiled"
        return len(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def overwrite_all_rows(self, data: DataProto) -> list[float]:
        """Every rank writes its own number, waits for the others to have done so, and reads."""
        data.batch["a"].fill_(self.rank)
        dist.barrier()
        return data.batch["a"].unique().tolist()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rank_and(self, *values: Any) -> Any:
        return self.rank, *values

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def own_entry(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def one_number(self, number: int) -> int:
        return number

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def texts(self, data: DataProto) -> list[str]:
        return [f"row {i}" for i in data.batch["id"].tolist()]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def own_batch(self) -> DataProto:
        return DataProto.from_dict({"rank": torch.full((2,), self.rank)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_to_count(self) -> None:
        """From now on every object that this process gets from Ray is counted."""
        if not hasattr(ray, "get_uncounted"):
            ray.get_uncounted, ray.get = ray.get, _counted_get
        _fetched.clear()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fetched_sizes(self) -> list[int]:
        return _fetched


def _counted_get(refs: Any, **options: Any) -> Any:
    values = ray.get_uncounted(refs, **options)
    _fetched.extend(size_of(value) for value in (values if isinstance(values, list) else [values]))
    return values


def size_of(value: Any) -> int:
    """Bytes of a value on its way, the buffers that are not pickled included."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(pickled) + sum(buffer.raw().nbytes for buffer in buffers)


def described(data: DataProto) -> dict[str, Any]:
    return {
        "keys": sorted([*data.batch.keys(), *data.non_tensor_batch]),
        "rows": data.batch["a"][:, 0].tolist(),
        "sums": {key: tensor.double().sum().item() for key, tensor in data.batch.items()},
    }


class Fragile(Worker):
    """Fails in every way a worker can."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def work(self, seconds: float = 0.0) -> int:
        time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, ranks: list[int]) -> int:
        if self.rank in ranks:
            raise ValueError(f"broken on purpose on {self.rank}")
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_by_the_user(self) -> None:
        raise ConfigError(["some.key=1: must be 2", "some.other=3: must be 4"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fail_with_batch(self, data: DataProto) -> DataProto:
        raise KeyError("no such column")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, data: DataProto, seconds: float = 0.0) -> DataProto:
        """A result that is too large for its header."""
        time.sleep(seconds)
        return DataProto.from_dict({"x": data.batch["x"], "wide": torch.zeros(len(data), 100_000)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_one(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def meet_the_one_that_sleeps(self, sleeper: int, seconds: float) -> None:
        if self.rank == sleeper:
            time.sleep(seconds)
        dist.all_reduce(torch.ones(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def fail_on_one_while_others_wait(self) -> None:
        if self.rank == 1:
            raise ValueError("did not come to the barrier")
        dist.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def leave(self) -> None:
        os._exit(3)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def steps(self, num_steps: int) -> int:
        """Short steps with a collective after each."""
        for _ in range(num_steps):
            time.sleep(0.02)
            dist.all_reduce(torch.ones(1000))
        return num_steps


class Greedy(Worker):
    """Wants more memory than there is, on rank 1: when it is made, or when it works."""

    def __init__(self, at_once: bool = False) -> None:
        self.override = f"some.rows={self.world_size}"
        if at_once:
            self.take_too_much()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_too_much(self) -> None:
        if self.rank == 1:
            torch.empty(2**50)

    def less_memory(self, method: str) -> list[str]:
        return [self.override, f"{method}.offload=true"]


class NeverReady(Worker):
    """A role whose model cannot be loaded on rank 1."""

    def __init__(self, path: str) -> None:
        if self.rank == 1:
            raise FileNotFoundError(f"no model at {path}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work(self) -> int:
        return self.rank


class Place(Worker):
    """Says where its process is."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def where(self) -> dict[str, Any]:
        return {
            "node_id": ray.get_runtime_context().get_node_id(),
            "gpus": [int(gpu) for gpu in ray.get_gpu_ids()],
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "local": (self.context.local_rank, self.context.local_world_size),
            "environment": (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]),
            "rank": dist.get_rank(),
            "device": self.device,
            "folder": str(Path.cwd()),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, *names: str) -> dict[str, str]:
        return {name: os.environ[name] for name in names if name in os.environ}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self) -> int:
        total = torch.ones(1)
        dist.all_reduce(total)
        return int(total)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def speak(self, words: str) -> None:
        print(words)  # noqa: T201
        logging.getLogger("a.role").info("logged %s", words)


class Stuck(Worker):
    """One rank does not come to the collective of the others."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def meet(self, how: str = "", stuck_rank: int = -1) -> int:
        if self.rank == stuck_rank:
            {"sleep": self.sleep_for_ever, "spin": self.spin_with_the_gil}[how]()
        dist.all_reduce(torch.ones(1))
        return self.rank

    def sleep_for_ever(self) -> None:
        time.sleep(1000)

    def spin_with_the_gil(self) -> None:
        sum(range(10**12))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def print_lines(self, num_lines: int) -> None:
        for number in range(num_lines):
            print(f"line {number}")  # noqa: T201
        print("end", flush=True)  # noqa: T201
