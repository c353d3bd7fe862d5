"""The rollout role: weights from another pool are checked, and the cache stays within its part of a
GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.errors import DataError, RolepoolError
from rolepool.placement.estimate import cache_room
from rolepool.protocol import DataProto
from rolepool.protocol.columns import flat_values, lengths_of, same_value, split_tokens
from rolepool.protocol.worker import WorkerContext, made_in
from rolepool.roles.rollout import Rollout
from rolepool.roles.setups import RolloutSetup
from rolepool.rollout import NativeEngine
from rolepool.rollout.engine import ABILITIES
from rolepool.rollout.transformers_engine import TransformersEngine
from rolepool.weights.messages import as_matrix
from rolepool.weights.rows import WeightRows

NORM = "model.norm.weight"
GIB = 2**30


@pytest.fixture
def weights(demo: Demo) -> dict[str, Tensor]:
    """All names that the actor exports: of tied weights both."""
    named = {
        name: tensor + 0.01 for name, tensor in load_file(demo.model / "model.safetensors").items()
    }
    return {**named, "lm_head.weight": named["model.embed_tokens.weight"]}


def make_rollout(
    demo: Demo, device: str = "cpu", *overrides: str, gets_weights: bool = False
) -> Rollout:
    """In float64 on a CPU, so that no two tokens are so close that rounding decides between
    them."""
    settings = [
        f"actor_rollout_ref.model.path={demo.model}",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
    ]
    config = load_config([], [*settings, *overrides]).config
    with made_in(WorkerContext(device=device)):
        setup = RolloutSetup(stop_token_ids=(1,), dtype=torch.float64, gets_weights=gets_weights)
        return Rollout(config, setup)


def leg(named: Iterable[tuple[str, Tensor]]) -> list[dict[str, WeightRows]]:
    """As two ranks of an actor export them."""
    exports: list[dict[str, WeightRows]] = [{}, {}]
    for name, tensor in named:
        matrix = as_matrix(tensor.detach())
        middle = (len(matrix) + 1) // 2
        shape = tuple(tensor.shape)
        # In the wrong order, which must not matter.
        exports[0][name] = WeightRows(shape, middle, matrix[middle:])
        exports[1][name] = WeightRows(shape, 0, matrix[:middle])
    return exports


def log_probs(rollout: Rollout) -> Tensor:
    return flat_values(rollout.generate_sequences(prompts()).batch["rollout_log_probs"])


def prompts(count: int = 3) -> DataProto:
    rows = {
        "raw_prompt_ids": [[4, 5, 3]] * count,
        "uid": list("abc")[:count],
        "sample_index": list(range(count)),
    }
    return DataProto.from_dict(non_tensors=rows)


def test_weights_that_come_in_legs_are_generated_with(
    demo: Demo, weights: dict[str, Tensor]
) -> None:
    with_log_probs = "actor_rollout_ref.rollout.calculate_log_probs=true"
    rollout, at_once = (make_rollout(demo, "cpu", with_log_probs) for _ in range(2))
    named = list(weights.items())
    before = log_probs(rollout)
    rollout.take_weights(leg(named[:5]), None)
    with pytest.raises(RolepoolError, match="failed halfway or has not ended"):
        rollout.generate_sequences(prompts())
    rollout.take_weights(leg(named[5:]), 3)
    assert rollout.engine.version == 3
    at_once.engine.update_weights(named, 3)
    after = log_probs(rollout)
    torch.testing.assert_close(after, log_probs(at_once), rtol=0, atol=1e-5)
    assert after.shape != before.shape or not torch.allclose(after, before, atol=1e-3)


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_a_rollout_that_gets_weights_reads_none_and_generates_the_same_with_those_it_gets(
    demo: Demo, weights: dict[str, Tensor], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        f"actor_rollout_ref.rollout.name={engine}",
    ]
    reading = make_rollout(demo, "cpu", *keys)
    reading.take_weights(leg(weights.items()), 1)

    with monkeypatch.context() as patched:
        patched.setattr(transformers.PreTrainedModel, "from_pretrained", _refuse_to_read)
        rollout = make_rollout(demo, "cpu", *keys, gets_weights=True)
    with pytest.raises(RolepoolError, match="has no weights yet"):
        rollout.generate_sequences(prompts())
    rollout.take_weights(leg(list(weights.items())[:5]), None)
    with pytest.raises(RolepoolError, match="has no weights yet"):
        rollout.generate_sequences(prompts())
    rollout.take_weights(leg(list(weights.items())[5:]), 1)
    assert torch.equal(log_probs(rollout), log_probs(reading))


def _refuse_to_read(*_: object, **__: object) -> None:
    raise AssertionError("the weights were read from the files of the model")


def test_rows_are_ragged_and_log_probs_come_only_if_asked_for(demo: Demo) -> None:
    asked = prompts()
    asked.non_tensor_batch["raw_prompt_ids"][1] = [4, 5, 6, 3, 7]
    sampled = make_rollout(demo).generate_sequences(asked)
    names = ["input_ids", "num_prompt_tokens", "num_response_tokens", "weights_version"]
    assert sorted(sampled.batch.keys()) == names
    num_prompt, num_response = (
        sampled.batch["num_prompt_tokens"],
        sampled.batch["num_response_tokens"],
    )
    assert num_prompt.tolist() == [3, 5, 3]
    assert (num_response >= 1).all() and (num_response <= 4).all()
    prompt_tokens, response_tokens = split_tokens(sampled.batch)
    assert [row.tolist() for row in prompt_tokens.unbind()] == asked.non_tensor_batch[
        "raw_prompt_ids"
    ].tolist()
    assert torch.equal(lengths_of(response_tokens), num_response)
    with_log_probs = make_rollout(demo, "cpu", "actor_rollout_ref.rollout.calculate_log_probs=true")
    both = with_log_probs.generate_sequences(asked)
    assert same_value(both.batch["input_ids"], sampled.batch["input_ids"])
    assert torch.equal(lengths_of(both.batch["rollout_log_probs"]), num_response)
    assert both.batch["rollout_log_probs"].dtype == torch.float64, "that of the model"


def test_a_weight_that_no_leg_brought_is_named_at_the_end(
    demo: Demo, weights: dict[str, Tensor]
) -> None:
    rollout = make_rollout(demo)
    others = leg((name, tensor) for name, tensor in weights.items() if name != NORM)
    with pytest.raises(DataError, match=r"1 of \d+ are missing: model\.norm\.weight"):
        rollout.take_weights(others, 1)
    assert rollout.engine.version == 0
    with pytest.raises(RolepoolError, match="failed halfway"):
        rollout.generate_sequences(prompts())


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        ({NORM: torch.zeros(128)}, r"model\.norm\.weight was sent twice"),
        ({"model.norm.wait": torch.zeros(64)}, r"model\.norm\.wait is not a weight"),
        ({"lm_head.weight": torch.zeros(3, 64)}, r"lm_head\.weight has shape \[3, 64\]"),
    ],
    ids=["double", "unknown", "misshaped"],
)
def test_a_leg_that_does_not_fit_is_refused_and_a_whole_set_mends_it(
    demo: Demo, weights: dict[str, Tensor], second: dict[str, Tensor], complaint: str
) -> None:
    rollout = make_rollout(demo)
    rollout.take_weights(leg([(NORM, weights[NORM])]), None)
    with pytest.raises(DataError, match=complaint):
        rollout.take_weights(leg(second.items()), None)
    with pytest.raises(DataError, match="are missing"):
        rollout.engine.update_weights((), 1)
    rollout.take_weights(leg(weights.items()), 2)
    assert len(rollout.generate_sequences(prompts())) == 3


@pytest.mark.parametrize(
    ("share", "free", "weights", "utilization", "room"),
    [
        (80, 70, 10, 0.5, 30),  # half of the GPU less the weights
        (40, 35, 10, 0.5, 10),  # of a pool with half of each GPU
        (80, 20, 10, 0.5, 10),  # others hold most of it
        (80, 60, 50, 0.5, 0),  # the weights alone are more
    ],
)
def test_the_cache_stays_within_its_part_of_the_gpu_and_of_what_is_free(
    share: int, free: int, weights: int, utilization: float, room: int
) -> None:
    assert cache_room(share * GIB, free * GIB, weights * GIB, utilization) == room * GIB


class EngineWithoutSeeds(TransformersEngine):
    abilities = ("sleep",)

    def __init__(self, load_model: Callable[[], nn.Module], **others: object) -> None:
        super().__init__(load_model(), max_num_seqs=4)


def test_what_an_engine_cannot_do_is_printed(demo: Demo, caplog: pytest.LogCaptureFixture) -> None:
    name = f"actor_rollout_ref.rollout.name={__name__}:EngineWithoutSeeds"
    made = make_rollout(demo, "cpu", name).generate_sequences(prompts()).batch
    assert caplog.messages == [f"{name} has no per_sample_seeds: {ABILITIES['per_sample_seeds']}"]
    assert made["weights_version"].tolist() == [0, 0, 0]
    assert torch.equal(lengths_of(made["rollout_log_probs"]), made["num_response_tokens"]), (
        "to be compared"
    )


@pytest.mark.gpu
def test_on_a_gpu_a_smaller_part_runs_fewer_sequences_at_once(demo: Demo) -> None:
    fraction = torch.cuda.get_per_process_memory_fraction()
    keep = ("actor_rollout_ref.rollout.free_cache_engine=false",)
    large = make_rollout(demo, "cuda", *keep)
    large.generate_sequences(prompts())
    assert isinstance(large.engine, NativeEngine)
    cache = large.engine._cache
    assert cache is not None and cache.num_slots == 3
    slot_bytes = cache.shape.slot_bytes(cache.length)
    held = sum(tensor.nbytes for tensor in large.engine.model.parameters())
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        utilization = (held + 1.5 * slot_bytes) / (0.5 * total)
        part = f"actor_rollout_ref.rollout.gpu_memory_utilization={utilization}"
        small = make_rollout(demo, "cuda", part, *keep)
        assert len(small.generate_sequences(prompts())) == 3
        assert (
            isinstance(small.engine, NativeEngine)
            and small.engine._cache is not None
            and small.engine._cache.num_slots == 1
        )
        with pytest.raises(
            RolepoolError, match=r"raise actor_rollout_ref\.rollout\.gpu_memory_utilization"
        ):
            tiny = f"actor_rollout_ref.rollout.gpu_memory_utilization={held / (0.5 * total)}"
            make_rollout(demo, "cuda", tiny, *keep).generate_sequences(prompts())
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction)
