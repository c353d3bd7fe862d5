"""The forward pass of a Hugging Face decoder on packed tokens and a slot cache: no padding, one row per token.

Owns how the layers of Llama-, Mistral-, Qwen2- and Qwen3-like models are computed, with the model's own weights,
activation and rotary tables. Does not know about requests, sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rolepool.errors import ConfigError, RolepoolError
from rolepool.models.packing import on_device
from rolepool.placement.models import num_positions, why_not_native
from rolepool.rollout import gpu
from rolepool.rollout.kv_cache import CacheShape, SlotCache
from rolepool.rollout.tensor_parallel import TensorParallel

_MAX_FLASH_HEAD_DIM = 256

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From a layer's index and the queries, keys and values (tokens, heads, head_dim), which are also in the cache, to
outputs (tokens, heads * head_dim)."""
Store = Callable[[int, Tensor], tuple[Tensor, Tensor, Tensor]]
"""From a layer's index and concatenated queries, keys and values (tokens, all heads, head_dim) to the three, after
rotary embedding; keys and values are stored in the cache."""


class Piece(NamedTuple):
    """Consecutive tokens of one prompt, prefilled together: `num_tokens` tokens from position `start`."""

    slot: int
    start: int
    num_tokens: int


class Projection:
    """Linear maps of the same input; their outputs are concatenated. They are one matrix product if `fuse` copies their
    weights into one matrix, or if `join_weights` has joined them, which needs no copy and follows updates."""

    def __init__(self, *linears: nn.Linear, fuse: bool) -> None:
        self._parts: list[tuple[Tensor, Tensor | None]] = [(linear.weight, linear.bias) for linear in linears]
        join = torch.cat if fuse else _joined
        weight, has_bias = join([linear.weight for linear in linears]), linears[0].bias is not None
        bias = join([linear.bias for linear in linears]) if has_bias else None
        if weight is not None and has_bias == (bias is not None):
            self._parts = [(weight, bias)]

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [F.linear(x, weight, bias) for weight, bias in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class Norm(NamedTuple):
    """RMS norm over the last axis."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Layer(NamedTuple):
    input_norm: Norm
    qkv: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    out: Projection
    mlp_norm: Norm
    gate_up: Projection
    gate: Callable[[Tensor], Tensor]
    """From concatenated gates and inner features to gated features."""
    down: Projection


@dataclass(frozen=True)
class Weights:
    """The model's weights as a forward pass uses them. Valid until the weights change."""

    embedding: Tensor
    layers: list[Layer]
    norm: Norm
    head: Projection
    cos: Tensor
    """(positions, head_dim)"""
    signed_sin: Tensor
    """(positions, head_dim); the first half is negated, so that rotating is a roll of the axis."""


class Decoder:
    """Forward passes of `model`, a Hugging Face causal language model, with the weights that `weights` returned.

    If the model is tensor-parallel, all ranks of `parallel` run the same passes.
    """

    def __init__(self, model: nn.Module, parallel: TensorParallel) -> None:
        self._parallel = parallel
        untyped: Any = model  # nn.Module's types do not know Hugging Face's attributes
        self._model, config = untyped, untyped.config
        refuse_unknown(model)
        layers = untyped.model.layers
        attention = layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._scale: float = attention.scaling
        self._windows = [_window_of_layer(config, index) for index in range(len(layers))]
        self._refuse_wrapped_linears()
        # Counted in the weights, because a tensor-parallel rank holds only some of the model's heads.
        self._num_heads: int = attention.q_proj.weight.shape[0] // self._head_dim
        self._num_kv_heads: int = attention.k_proj.weight.shape[0] // self._head_dim
        self._is_silu = config.hidden_act == "silu"
        self._place: Tensor | None = None
        self.max_positions = num_positions(config.to_dict())
        self.vocab_size: int = config.vocab_size

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.model.embed_tokens.weight.device
        return device

    @property
    def cache_shape(self) -> CacheShape:
        embedding = self._model.model.embed_tokens.weight
        return CacheShape(len(self._windows), self._num_kv_heads, self._head_dim, embedding.dtype, embedding.device)

    def weights(self, num_positions: int, fuse: bool) -> Weights:
        """The current weights. `fuse` copies weights that are applied to the same input into one matrix: fewer, larger
        matrix products, at the cost of a second copy of half the model."""
        trunk = self._model.model
        embedding = trunk.embed_tokens.weight
        cos, sin = trunk.rotary_emb(embedding, torch.arange(num_positions, device=embedding.device)[None])
        half = self._head_dim // 2
        return Weights(
            embedding=embedding,
            layers=[self._read_layer(layer, fuse) for layer in trunk.layers],
            norm=_read_norm(trunk.norm),
            head=Projection(self._model.lm_head, fuse=False),
            cos=cos[0],
            signed_sin=torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1),
        )

    def locate(self, cache: SlotCache) -> None:
        """Tell the kernels where the cache is, in a tensor that keeps its address."""
        place = on_device(torch.tensor(cache.place), self.device)
        self._place = place if self._place is None else self._place.copy_(place)

    def prefill(self, weights: Weights, cache: SlotCache, tokens_t: Tensor, pieces: list[Piece]) -> Tensor:
        """Run the packed tokens of `pieces`; the final state (pieces, hidden) of each piece's last token."""
        counts = torch.tensor([piece.num_tokens for piece in pieces])
        slots = torch.tensor([piece.slot for piece in pieces]).repeat_interleave(counts)
        positions = gpu.tensor_of(range(piece.start, piece.start + piece.num_tokens) for piece in pieces)
        slots_t, positions_t, last = (
            on_device(host, tokens_t.device) for host in (slots, positions, counts.cumsum(0) - 1)
        )
        is_flash = self._can_flash(cache.shape) and all(piece.start == 0 for piece in pieces)
        attention = self._flash_attention(pieces) if is_flash else self._prefill_attention(weights, cache, pieces)
        hidden_te = self._run(weights, cache, tokens_t, positions_t, slots_t, attention)
        return hidden_te[last]

    def decode(
        self, weights: Weights, cache: SlotCache, tokens_b: Tensor, positions_b: Tensor, slots_b: Tensor, length: int
    ) -> Tensor:
        """Run one token of each row; the final states (rows, hidden). With kernels a row may use any slot, and none at
        position -1. Otherwise row i uses slot i, and all positions are less than `length`."""
        if gpu.has_kernels(tokens_b.device):
            attention = self._kernel_attention(positions_b, slots_b)
        else:
            attention = self._decode_attention(weights, cache, positions_b, length)
        return self._run(weights, cache, tokens_b, positions_b, slots_b, attention)

    def _run(
        self,
        weights: Weights,
        cache: SlotCache,
        tokens_t: Tensor,
        positions_t: Tensor,
        slots_t: Tensor,
        attention: Attention,
    ) -> Tensor:
        by_kernels = gpu.has_kernels(tokens_t.device)
        store = (self._kernel_store if by_kernels else self._store)(weights, cache, positions_t, slots_t)
        add_norm = _kernel_add_norm if by_kernels else _add_norm
        next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        x_te = F.embedding(tokens_t, weights.embedding)
        normed_te = weights.layers[0].input_norm(x_te)
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            qkv_thd = layer.qkv(normed_te).unflatten(1, (-1, self._head_dim))
            if layer.q_norm is not None and layer.k_norm is not None:
                num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
                queries_thd, keys_thd, values_thd = qkv_thd.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
                qkv_thd = torch.cat((layer.q_norm(queries_thd), layer.k_norm(keys_thd), values_thd), dim=1)
            attended_te = attention(index, *store(index, qkv_thd))
            x_te, normed_te = add_norm(x_te, self._parallel.sum(layer.out(attended_te)), layer.mlp_norm)
            inner_te = layer.gate(layer.gate_up(normed_te))
            x_te, normed_te = add_norm(x_te, self._parallel.sum(layer.down(inner_te)), next_norm)
        return normed_te

    def _store(self, weights: Weights, cache: SlotCache, positions_t: Tensor, slots_t: Tensor) -> Store:
        cos_t1d, sin_t1d = weights.cos[positions_t][:, None], weights.signed_sin[positions_t][:, None]
        places = cache.places(slots_t, positions_t)
        num_heads, half = self._num_heads, self._head_dim // 2

        def store(index: int, qkv_thd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            qk_thd, values_thd = qkv_thd[:, : -self._num_kv_heads], qkv_thd[:, -self._num_kv_heads :]
            qk_thd = torch.addcmul(qk_thd * cos_t1d, qk_thd.roll(half, dims=-1), sin_t1d)
            cache.write(index, places, qk_thd[:, num_heads:], values_thd)
            return qk_thd[:, :num_heads], qk_thd[:, num_heads:], values_thd

        return store

    def _kernel_store(self, weights: Weights, cache: SlotCache, positions_t: Tensor, slots_t: Tensor) -> Store:
        from rolepool.rollout import kernels

        def store(index: int, qkv_thd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert self._place is not None
            kernels.rotate_and_store(
                qkv_thd, self._num_heads, weights.cos, weights.signed_sin, positions_t, slots_t, self._place, index
            )
            queries, keys, values = qkv_thd.split((self._num_heads, self._num_kv_heads, self._num_kv_heads), dim=1)
            return queries, keys, values

        return store

    def _kernel_attention(self, positions_b: Tensor, slots_b: Tensor) -> Attention:
        from rolepool.rollout import kernels

        def attend(index: int, queries_bhd: Tensor, _keys: Tensor, _values: Tensor) -> Tensor:
            assert self._place is not None
            window = self._windows[index]
            return kernels.attend(
                queries_bhd, self._num_kv_heads, positions_b, slots_b, self._place, index, window, self._scale
            )

        return attend

    def _can_flash(self, shape: CacheShape) -> bool:
        fits = shape.head_dim % 8 == 0 and shape.head_dim <= _MAX_FLASH_HEAD_DIM
        return fits and shape.device.type == "cuda" and shape.dtype.itemsize == 2

    def _flash_attention(self, pieces: list[Piece]) -> Attention:
        """Whole prompts, packed, without padding or repeated keys."""
        ends = torch.tensor([0] + [piece.num_tokens for piece in pieces]).cumsum(0)
        ends_n = on_device(ends.int(), self.device)
        longest = max(piece.num_tokens for piece in pieces)

        def attend(index: int, queries_thd: Tensor, keys_thd: Tensor, values_thd: Tensor) -> Tensor:
            window = self._windows[index]
            # The operator itself, because its public function accepts grouped queries only in some versions of torch.
            outputs_thd = torch.ops.aten._flash_attention_forward(
                queries_thd,
                keys_thd,
                values_thd,
                ends_n,
                ends_n,
                longest,
                longest,
                0.0,
                True,
                False,
                scale=self._scale,
                window_size_left=None if window is None else window - 1,
                window_size_right=None if window is None else 0,
            )[0]
            flat: Tensor = outputs_thd.flatten(1)
            return flat

        return attend

    def _decode_attention(self, weights: Weights, cache: SlotCache, positions_b: Tensor, length: int) -> Attention:
        """Queries of a group use the axis of positions, so that keys are read once and not repeated."""
        num_rows, num_groups = positions_b.shape[0], self._num_heads // self._num_kv_heads
        masks: dict[int | None, Tensor] = {}
        for window in set(self._windows):
            hidden_bl = ~_visible(positions_b, length, window)
            mask_bl = torch.zeros_like(hidden_bl, dtype=weights.cos.dtype).masked_fill_(hidden_bl, -torch.inf)
            masks[window] = mask_bl[:, None, None].repeat(1, 1, num_groups, 1)

        def attend(index: int, queries_bhd: Tensor, _keys: Tensor, _values: Tensor) -> Tensor:
            keys_bhld, values_bhld = cache.read(index, slice(0, num_rows), length)
            outputs_bhgd = F.scaled_dot_product_attention(
                queries_bhd.unflatten(1, (self._num_kv_heads, num_groups)),
                keys_bhld,
                values_bhld,
                attn_mask=masks[self._windows[index]],
                scale=self._scale,
            )
            return outputs_bhgd.reshape(num_rows, -1)

        return attend

    def _prefill_attention(self, weights: Weights, cache: SlotCache, pieces: list[Piece]) -> Attention:
        """Adjacent pieces with the same start and length are computed in one call, without padding."""
        runs: list[tuple[int, Piece, int]] = []  # first token, first piece, number of pieces
        num_tokens = 0
        for piece in pieces:
            first_token, first, num_pieces = runs[-1] if runs else (0, piece, 0)
            if num_pieces and piece == (first.slot + num_pieces, first.start, first.num_tokens):
                runs[-1] = (first_token, first, num_pieces + 1)
            else:
                runs.append((num_tokens, piece, 1))
            num_tokens += piece.num_tokens

        def mask_of(piece: Piece, window: int | None) -> Tensor | None:
            end = piece.start + piece.num_tokens
            if window is not None and end <= window:
                window = None
            if piece.start == 0 and window is None:
                return None
            return _visible(torch.arange(piece.start, end, device=weights.cos.device), end, window)

        masks = {(first, window): mask_of(first, window) for _, first, _ in runs for window in set(self._windows)}

        def attend(index: int, queries_thd: Tensor, _keys: Tensor, _values: Tensor) -> Tensor:
            outputs = []
            for first_token, first, num_pieces in runs:
                rows = slice(first_token, first_token + num_pieces * first.num_tokens)
                slots = slice(first.slot, first.slot + num_pieces)
                keys_nhld, values_nhld = cache.read(index, slots, first.start + first.num_tokens)
                mask = masks[first, self._windows[index]]
                outputs_nhtd = F.scaled_dot_product_attention(
                    queries_thd[rows].unflatten(0, (num_pieces, first.num_tokens)).transpose(1, 2),
                    keys_nhld,
                    values_nhld,
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=self._scale,
                    enable_gqa=self._num_heads != self._num_kv_heads,
                )
                outputs.append(outputs_nhtd.transpose(1, 2).flatten(2).flatten(0, 1))
            return torch.cat(outputs)

        return attend

    def _read_layer(self, layer: Any, fuse: bool) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        has_head_norms = hasattr(attention, "q_norm")
        return Layer(
            input_norm=_read_norm(layer.input_layernorm),
            qkv=Projection(attention.q_proj, attention.k_proj, attention.v_proj, fuse=fuse),
            q_norm=_read_norm(attention.q_norm) if has_head_norms else None,
            k_norm=_read_norm(attention.k_norm) if has_head_norms else None,
            out=Projection(attention.o_proj, fuse=False),
            mlp_norm=_read_norm(layer.post_attention_layernorm),
            gate_up=Projection(mlp.gate_proj, mlp.up_proj, fuse=fuse),
            gate=self._read_gate(mlp.act_fn),
            down=Projection(mlp.down_proj, fuse=False),
        )

    def _read_gate(self, activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if self._is_silu and gpu.has_kernels(self.device):
            from rolepool.rollout import kernels

            return kernels.silu_gate

        def gate(gate_up_te: Tensor) -> Tensor:
            gates_te, up_te = gate_up_te.chunk(2, dim=-1)
            return activation(gates_te) * up_te

        return gate

    def _refuse_wrapped_linears(self) -> None:
        """The `weight` of a projection with an adapter, or of a quantized one, does not tell what it computes."""
        for name, module in self._model.named_modules():
            is_projection = name.endswith("_proj") or name == "lm_head"
            if is_projection and type(module).forward is not nn.Linear.forward:
                raise RolepoolError(
                    f"the native rollout engine needs plain linear layers; {name} is a {type(module).__name__}. "
                    "Merge adapters into the weights first"
                )


def refuse_unknown(model: Any) -> None:
    """Raise ConfigError unless `Decoder` can run this kind of model."""
    if (reason := why_not_native(model.config.to_dict())) is not None:
        raise ConfigError(f"actor_rollout_ref.model.path={model.config.name_or_path}: {reason}; choose such a model")


def _window_of_layer(config: Any, index: int) -> int | None:
    """Number of tokens that a token attends to, including itself; None means all. Mistral has a window in all layers or
    in none, Qwen in some layers, Llama never."""
    if config.model_type == "llama":
        return None
    if config.model_type in ("qwen2", "qwen3") and config.layer_types[index] != "sliding_attention":
        return None
    window: int | None = config.sliding_window
    return window


def _visible(positions_t: Tensor, length: int, window: int | None) -> Tensor:
    """Which of the first `length` tokens a token at each position attends to: (positions, length)."""
    seen_l, own_t1 = torch.arange(length, device=positions_t.device), positions_t[:, None]
    visible_tl = seen_l <= own_t1
    return visible_tl if window is None else visible_tl & (seen_l > own_t1 - window)


def _read_norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _add_norm(x_te: Tensor, delta_te: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    x_te = x_te + delta_te
    return x_te, norm(x_te)


def _kernel_add_norm(x_te: Tensor, delta_te: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    from rolepool.rollout import kernels

    return x_te, kernels.add_norm(x_te, delta_te, norm.weight, norm.eps)


@torch.no_grad()
def join_weights(model: Any) -> None:
    """Store weights that are applied to the same input in one tensor, so that they are used as one matrix. They stay
    separate parameters, which are still updated in place."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linears in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            for name in ("weight", "bias"):
                parts = [getattr(linear, name) for linear in linears]
                if parts[0] is not None and _joined(parts) is None:
                    joint = torch.cat([part.data for part in parts])
                    for part, view in zip(parts, joint.split([len(part) for part in parts]), strict=True):
                        part.data = view


def _joined(parts: list[Tensor]) -> Tensor | None:
    """One tensor over parts that follow each other in one storage; None if they do not."""
    first = parts[0]
    for part, following in pairwise(parts):
        is_next = following.data_ptr() == part.data_ptr() + part.nbytes
        if not is_next or following.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    if not all(part.is_contiguous() for part in parts):
        return None
    return first.detach().as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
