"""Models from folders: what is not there, not whole or not of the kind is refused by its key, not
made up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from commands import Outcome
from rolepool.config import load_config
from rolepool.errors import ConfigError
from rolepool.models.loading import load_critic, load_policy, load_reward_model
from rolepool.placement import build_plan
from rolepool.trainer.inputs import check_inputs
from tiny_models import write_model

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "num_hidden_layers": 2,
}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module", params=[False, True], ids=["head of its own", "tied head"])
def language_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=request.param)).save_pretrained(
        folder
    )  # type: ignore[no-untyped-call]
    return folder


@pytest.fixture
def model(language_model: Path, tmp_path: Path) -> Path:
    """One to break."""
    return Path(shutil.copytree(language_model, tmp_path / "model"))


def policy(path: Path, **overrides: int) -> nn.Module:
    keys = {"path": str(path), "override_config": overrides}
    return load_policy(
        load_config([{"actor_rollout_ref": {"model": keys}}], []).config,
        torch.float32,
        packed=False,
    )


def critic(path: Path) -> nn.Module:
    return load_critic(
        load_config([], [f"critic.model.path={path}"]).config, torch.float32, packed=False
    )


def reward_model(path: Path) -> nn.Module:
    config = load_config([], [f"reward_model.model.path={path}"]).config
    return load_reward_model(config, "reward_model.model", torch.float32)


def refusal(load: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load()
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


def test_a_language_model_is_a_policy_and_the_trunk_of_a_critic(language_model: Path) -> None:
    saved = load_file(language_model / WEIGHTS)["model.embed_tokens.weight"]
    for load in (policy, critic):
        assert torch.equal(load(language_model).state_dict()["model.embed_tokens.weight"], saved)


def test_a_language_model_is_no_reward_model(language_model: Path) -> None:
    line = refusal(lambda: reward_model(language_model))
    assert line.startswith(
        f"reward_model.model.path={language_model}: weights of a LlamaForSequenceClassification "
    )
    assert "are not in its files (score.weight), so they would be random" in line


def test_a_classifier_of_several_labels_is_no_reward_model(tmp_path: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=3)).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    assert "have another shape in its files (score.weight)" in refusal(
        lambda: reward_model(tmp_path)
    )


@pytest.mark.parametrize("load", [policy, critic])
def test_a_weight_that_is_missing_is_named(model: Path, load: Callable[[Path], nn.Module]) -> None:
    weights = load_file(model / WEIGHTS)
    del weights["model.norm.weight"]
    save_file(weights, model / WEIGHTS, {"format": "pt"})
    assert "are not in its files (model.norm.weight)" in refusal(lambda: load(model))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("load", "key"),
    [(policy, "actor_rollout_ref.model.path"), (critic, "critic.model.path")],
    ids=["policy", "critic"],
)
def test_a_weight_that_is_not_finite_is_named(
    model: Path, load: Callable[[Path], nn.Module], key: str, number: float
) -> None:
    weights = load_file(model / WEIGHTS)
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = number
    save_file(weights, model / WEIGHTS, {"format": "pt"})
    line = refusal(partial(load, model))
    assert line.startswith(
        f"{key}={model}: weights are not finite (model.layers.1.mlp.up_proj.weight)"
    )


def test_an_override_that_asks_for_more_layers_is_refused_and_one_for_fewer_is_not(
    language_model: Path,
) -> None:
    line = refusal(lambda: policy(language_model, num_hidden_layers=3))
    assert (
        "weights of a LlamaForCausalLM are not in its files (model.layers.2.input_layernorm.weight, "
        in line
    )
    assert " and 6 more), so they would be random" in line
    assert "have another shape in its files" in refusal(
        lambda: policy(language_model, vocab_size=17)
    )
    assert "hidden_size" in refusal(lambda: policy(language_model, hidden_size="many"))  # type: ignore[arg-type]
    policy(language_model, num_hidden_layers=1)


@pytest.mark.parametrize("length", [0, 4, 1000])
def test_a_file_that_is_cut_short_is_named(model: Path, length: int) -> None:
    whole = (model / WEIGHTS).read_bytes()
    assert length < len(whole)
    (model / WEIGHTS).write_bytes(whole[:length])
    assert refusal(lambda: critic(model)).startswith(
        f"critic.model.path={model}: {WEIGHTS} is damaged ("
    )


# Before a process is started


def check(model: Path, *overrides: str) -> None:
    config = load_config(overrides=[f"actor_rollout_ref.model.path={model}", *overrides]).config
    check_inputs(config, build_plan(config))


def test_what_can_be_loaded_is_let_through(language_model: Path) -> None:
    check(language_model)


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.model.path", "critic.model.path", "reward_model.model.path"]
)
def test_every_models_folder_is_looked_into(language_model: Path, tmp_path: Path, key: str) -> None:
    empty, bare, config_alone = tmp_path / "empty", tmp_path / "bare", tmp_path / "config_alone"
    for folder in (empty, bare, config_alone):
        folder.mkdir()
    (config_alone / "config.json").write_text(json.dumps({"model_type": "llama"}))
    shutil.copy(language_model / WEIGHTS, bare)
    expected = {
        tmp_path
        / "nowhere": f"there is no such folder; the folders in {tmp_path} are bare, config_alone, empty",
        "no-such-org/model": "is neither a folder nor a model on the hub",
        empty: "has no weights and no config.json",
        bare: "has no config.json",
        config_alone: "has no weights",
    }
    others = ["reward_model.enable=true", f"reward_model.model.path={language_model}"]
    if not key.startswith("reward_model"):
        others = [f"critic.model.path={language_model}"]
    for path, said in expected.items():
        line = refusal(partial(check, language_model, *others, f"{key}={path}"))
        assert line.startswith(f"{key}={path}: {said}")


def test_a_reward_function_that_cannot_be_loaded_is_refused(
    language_model: Path, tmp_path: Path
) -> None:
    key = f"custom_reward_function.path={tmp_path / 'reward.py'}"
    assert refusal(lambda: check(language_model, key)).startswith(f"{key}: cannot be imported (")
    (tmp_path / "reward.py").write_text("def other(): ...")
    line = refusal(lambda: check(language_model, key))
    assert (
        line
        == f"{key}: compute_score is not defined in {tmp_path / 'reward.py'}, which defines other"
    )


def test_train_says_so_in_one_line(rolepool: Callable[..., Outcome], language_model: Path) -> None:
    nowhere = "critic.model.path=/no/such/folder"
    outcome = rolepool(
        "train",
        f"actor_rollout_ref.model.path={language_model}",
        nowhere,
        "trainer.n_gpus_per_node=1",
    )
    assert outcome.code == 2
    assert outcome.err.startswith(
        f"error: {nowhere}: there is no such folder; the folders in / are "
    )


# bloom ties its head, gemma scales embeddings with a buffer, deepseek has experts.
@pytest.mark.parametrize("family", ["bloom", "gemma3_text", "deepseek_v3", "qwen2"])
@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_a_model_without_weights_becomes_the_same_model_when_a_state_is_loaded(
    family: str, load: Callable[..., nn.Module], tmp_path: Path
) -> None:
    """What a saved state does not have must not depend on whether weights were read."""
    folder = write_model(tmp_path, family)
    sections = ("actor_rollout_ref.model", "critic.model")
    config = load_config([], [f"{section}.path={folder}" for section in sections]).config
    whole = load(config, torch.float32, packed=True)
    empty = load(config, torch.float32, packed=True, reads_weights=False)
    assert type(empty).__name__ == type(whole).__name__
    assert empty.training == whole.training
    saved = empty.state_dict().keys()
    for name, buffer in whole.named_buffers():
        assert name in saved or torch.equal(buffer, empty.get_buffer(name))
    empty.load_state_dict(whole.state_dict())
    weights = dict(whole.named_parameters())  # tied weights are listed once
    assert list(weights) == [name for name, _ in empty.named_parameters()]
    for name, weight in weights.items():
        assert torch.equal(weight, empty.get_parameter(name))
        assert weight.requires_grad == empty.get_parameter(name).requires_grad


def test_no_weight_is_read_if_a_state_will_be_loaded(model: Path) -> None:
    """A damaged number would be an error."""
    tensors = load_file(model / WEIGHTS)
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    config = load_config([], [f"actor_rollout_ref.model.path={model}"]).config
    with pytest.raises(ConfigError, match="not finite"):
        load_policy(config, torch.float32, packed=False)
    load_policy(config, torch.float32, packed=False, reads_weights=False)
