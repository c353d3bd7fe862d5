"""What a model's config.json says before a process starts, without torch: its shape, and whether it
can be run.

Owns finding the file (in a folder, or in the local Hugging Face cache; nothing is ever downloaded),
reading single entries of it, counting parameters, which models each rollout engine can run, and the
messages for a folder that is missing or incomplete. The engines themselves are in
`rolepool.rollout`.
"""

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from rolepool.config.run_keys import MAX_GPUS_PER_NODE
from rolepool.errors import RolepoolError, first_few, one_line
from rolepool.reading import read_small

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
PACKABLE_TYPES = {
    *MODEL_TYPES,
    "cohere",
    "deepseek_v3",
    "gemma",
    "gemma3_text",
    "glm4",
    "gpt2",
    "gpt_neox",
    "granite",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2_moe",
    "qwen3_moe",
    "smollm3",
}
"""Models that compute packed rows as they compute padded ones. Others would mix sequences, or
ignore softcapping."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings in which a position's angles do not depend on the longest sequence of the
batch."""


NUM_EXPERTS = AliasChoices("num_experts", "num_local_experts", "n_routed_experts")


class ShapeUnknown(RolepoolError, ValueError):
    """The model's shape is not known; the message says why."""


def model_folder(path: str | None) -> Path | None:
    """The folder of a model: `path` itself, or the newest copy of a hub id in the local cache; None
    without a copy."""
    if path is None:
        return None
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    name = path.replace("/", "--")
    snapshots = cache / "hub" / f"models--{name}" / "snapshots"
    files = snapshots.glob("*/config.json")
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    return None if newest is None else newest.parent


def read_model_file(
    path: str | None,
    overrides: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The content of a model's config.json, with entries replaced. `path` is a folder, or a hub id
    in the local cache.

    Raises ShapeUnknown with the reason.
    """
    if path is None:
        raise ShapeUnknown("no model path is set")
    try:
        folder = model_folder(path)
        content = None
        if folder is not None:
            content = json.loads(read_small(folder / "config.json"))
    except (OSError, ValueError, RuntimeError) as error:
        raise ShapeUnknown(f"config.json of {path} cannot be read ({one_line(error)})") from error
    if folder is None:
        raise ShapeUnknown(f"{path} is not on disk, and plan never downloads")
    if not isinstance(content, dict):
        raise ShapeUnknown(f"config.json of {path} is not a JSON object")
    return {**content, **(overrides or {})}


def why_no_model(key: str, path: str | None) -> str | None:
    """Why the value of `key` cannot be a model; None if it can, or if only the hub knows."""
    if path is None:
        return f"{key}=null: no model is set; give a folder or a hub id"
    try:
        folder = Path(path).expanduser()
        if folder.is_dir():
            return _why_incomplete(key, folder, path)
        is_hub_id = path.count("/") < 2 and not path.startswith(("/", ".", "~"))
        if is_hub_id and not (path.count("/") == 1 and folder.parent.is_dir()):
            return None
        with suppress(ShapeUnknown):
            read_model_file(path)
            return None  # a hub id in the local cache
        return f"{key}={path}: there is no such folder; {_nearest_folder(folder)}"
    except (OSError, ValueError, RuntimeError) as error:
        # The path may begin with a home folder that does not exist, or have a name that cannot be.
        return f"{key}={path}: cannot be read ({one_line(error)}); give a folder or a hub id"


def _why_incomplete(key: str, folder: Path, path: str) -> str | None:
    """Why a folder is no model; None if it has everything."""
    missing = []
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if not has_weights:
        missing.append("weights")
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not missing:
        return None
    fix = "give a folder with a config.json and *.safetensors files"
    return f"{key}={path}: has no {' and no '.join(missing)}; {fix}"


def _nearest_folder(missing: Path) -> str:
    """The folder that the user most likely means, or what is in the deepest folder of the path that
    exists."""
    parent = next(folder for folder in missing.parents if folder.is_dir())
    name, *below = missing.relative_to(parent).parts
    there = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    close = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
    if close:
        similar = parent / close[0]
        whole = similar.joinpath(*below)
        meant = whole if whole.is_dir() else similar
        return f"did you mean {meant}?"
    if there:
        return f"the folders in {parent} are {first_few(there, 5)}"
    return f"{parent} contains no folder"


def num_positions(content: Mapping[str, object]) -> int:
    """Most tokens in a sequence of a model with this config.json: its own number, or what its
    rotary embeddings are scaled to. Raises ValueError or TypeError if the file does not say."""
    written = content.get("max_position_embeddings") or content.get("n_positions")
    if type(written) is not int or not 0 < written < 2**31:
        raise ValueError(f"max_position_embeddings={written} must be an integer over 0")
    rope = _rotary_embeddings(content)
    original = rope.get("original_max_position_embeddings", written)
    factor = rope.get("factor", 1)
    if not isinstance(original, int | float) or not isinstance(factor, int | float):
        raise TypeError(f"rotary embeddings: {original} and {factor} must be numbers")
    scaled = int(original * factor)
    return max(written, scaled)


def _rotary_embeddings(content: Mapping[str, object]) -> Mapping[str, object]:
    """What a config.json says about rotary embeddings; newer files have another name for it."""
    rope = content.get("rope_parameters") or content.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


Size = Annotated[int, Field(gt=0, lt=2**31)]


class ModelShape(BaseModel, frozen=True, strict=True, populate_by_name=True):
    """A decoder-only transformer with gated MLPs, such as Llama, Mistral, Qwen and DeepSeek-LLM.
    The aliases are the names of the entries in config.json."""

    hidden_size: Size
    num_layers: Size = Field(alias="num_hidden_layers")
    num_heads: Size = Field(alias="num_attention_heads")
    num_kv_heads: Size = Field(
        alias="num_key_value_heads", default_factory=lambda shape: shape["num_heads"]
    )
    head_dim: Size = Field(default_factory=lambda shape: shape["hidden_size"] // shape["num_heads"])
    intermediate_size: Size = Field(
        validation_alias=AliasChoices("moe_intermediate_size", "intermediate_size")
    )
    vocab_size: Size
    tied_embeddings: bool = Field(alias="tie_word_embeddings", default=False)
    attention_bias: bool = False
    num_experts: Size = Field(validation_alias=NUM_EXPERTS, default=1)
    num_active_experts: Size = Field(alias="num_experts_per_tok", default=1)

    @property
    def attention_width(self) -> int:
        """Numbers per token that attention reads and returns: queries, keys, values and outputs."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def mlp_width(self) -> int:
        """Numbers per token inside the MLP, in all experts that compute the token."""
        return self.intermediate_size * self.num_active_experts

    @property
    def layer_params(self) -> int:
        """The four projections of attention with their biases, the three of every expert, the
        router and two norms."""
        biases = 0
        if self.attention_bias:
            biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        router = 0
        if self.num_experts > 1:
            router = self.num_experts
        mlps = 3 * self.intermediate_size * self.num_experts
        norms = 2
        widths = self.attention_width + mlps + router + norms
        return self.hidden_size * widths + biases

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Parameters of a language model: layers, embedding, last norm, and an output head if it is
        not tied."""
        num_embeddings = 1 if self.tied_embeddings else 2
        return (
            self.num_layers * self.layer_params
            + num_embeddings * self.embedding_params
            + self.hidden_size
        )

    @property
    def num_scalar_head_params(self) -> int:
        """Parameters of a value or reward model, whose output head has one output."""
        last_norm = self.hidden_size
        head = self.hidden_size
        layers = self.num_layers * self.layer_params
        return layers + self.embedding_params + last_norm + head


def read_shape(path: str | None, overrides: Mapping[str, object] | None = None) -> ModelShape:
    """The shape of the model at a path, with entries of its config.json replaced. Raises
    ShapeUnknown."""
    content = read_model_file(path, overrides)
    content.setdefault("attention_bias", content.get("model_type") == "qwen2")
    # Models write null or 0 for "there are none".
    entries = {name: value for name, value in content.items() if value}
    try:
        return ModelShape.model_validate(entries)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        value = None if wrong["type"] == "missing" else wrong["input"]
        reason = f"{wrong['loc'][0]}={value} must be an integer over 0"
        raise ShapeUnknown(
            f"config.json of {path} does not describe a Llama-like decoder ({reason})"
        ) from error


def why_not_run(engine: str, content: Mapping[str, object]) -> str | None:
    """Why a rollout engine cannot run the model of a config.json; None if it can, or if the file
    does not say."""
    if engine != "native":
        if content.get("is_encoder_decoder"):
            return f"the {engine} engine cannot run an encoder-decoder model"
        return None
    model_type = content.get("model_type") or MODEL_TYPES[0]
    if model_type not in MODEL_TYPES:
        return _not_native(f"model_type {model_type}", MODEL_TYPES)
    rope = _rotary_embeddings(content)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        return _not_native(f"rotary embeddings of type {rope_type}", ROPE_TYPES)
    return None


def _not_native(what: str, supported: Iterable[str]) -> str:
    return f"the native rollout engine cannot run {what}; it runs {', '.join(supported)}"


def why_not_parallel(
    num_heads: int,
    num_kv_heads: int,
    inner_size: int,
    size: int,
) -> str | None:
    """Why a model cannot be split over `size` tensor-parallel ranks, and which sizes work; None if
    it can."""
    most = min(num_heads, MAX_GPUS_PER_NODE)  # the ranks are processes of one node
    fits = []
    for ranks in range(1, most + 1):
        is_divisible = num_heads % ranks == 0 and inner_size % ranks == 0
        # Ranks share a key-value head if there are fewer heads than ranks.
        has_kv_heads = num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0
        if is_divisible and has_kv_heads:
            fits.append(ranks)
    if size in fits:
        return None
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    use = " or ".join(map(str, fits))
    model = f"{num_heads} heads, {num_kv_heads} key-value heads and {inner_size} inner features of the MLP"
    return f"{key}={size}: cannot split the model's {model} evenly; use {use}"
