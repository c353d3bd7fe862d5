"""The forward pass of a Hugging Face decoder on packed tokens and a slot cache: no padding, one row
per token.

Owns how the layers of Llama-, Mistral-, Qwen2- and Qwen3-like models are computed, with the model's
own weights, activation and rotary tables. Does not know about requests, sampling or scheduling.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rolepool.config.model_files import why_not_run
from rolepool.errors import ConfigError, RolepoolError
from rolepool.models.packing import on_device
from rolepool.rollout.kv_cache import CacheShape, SlotCache
from rolepool.rollout.tensor_parallel import HfConfig, HfModule, TensorParallel

UNLIMITED = 2**30
"""The window of layers without a window: more tokens than any sequence has."""
_MAX_FLASH_HEAD_DIM = 256

Store = Callable[[int, Tensor], tuple[Tensor, ...]]
"""From a layer's index and concatenated queries, keys and values (tokens, all heads, head_dim) to
the three, after rotary embedding; keys and values are stored in the cache."""
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From a layer's index and the queries, keys and values (tokens, heads, head_dim), which are also
in the cache, to outputs (tokens, heads * head_dim)."""


class Piece(NamedTuple):
    """Consecutive tokens of one prompt, prefilled together: `num_tokens` tokens from position
    `start`."""

    slot: int
    start: int
    num_tokens: int


class Projection:
    """Linear maps of the same input; their outputs are concatenated. They are one matrix product if
    `join_weights` has joined their weights, which needs no copy and follows updates. On a CPU,
    where the number of operations matters, other weights are copied into one matrix."""

    def __init__(self, *linears: nn.Linear) -> None:
        self._parts: list[tuple[Tensor, Tensor | None]] = [
            (linear.weight, linear.bias) for linear in linears
        ]
        """Weight and bias of each matrix product."""
        may_copy = not linears[0].weight.is_cuda
        has_bias = linears[0].bias is not None
        weight = _joined([linear.weight for linear in linears], or_copy=may_copy)
        bias = None
        if has_bias:
            bias = _joined([linear.bias for linear in linears], or_copy=may_copy)
        bias_is_joined = bias is not None or not has_bias
        if weight is not None and bias_is_joined:
            self._parts = [(weight, bias)]

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [F.linear(x, weight, bias) for weight, bias in self._parts]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs, dim=-1)


class Norm:
    """RMS norm over the last axis."""

    def __init__(self, module: HfModule) -> None:
        self.weight: Tensor = module.weight
        self.eps: float = module.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Layer:
    """The weights of one layer."""

    def __init__(self, layer: HfModule) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        self.input_norm = Norm(layer.input_layernorm)
        self.qkv = Projection(attention.q_proj, attention.k_proj, attention.v_proj)
        self.head_norms: tuple[Norm, Norm] | None = None
        """Norms of queries and keys; only Qwen3 has them."""
        if hasattr(attention, "q_norm"):
            self.head_norms = (Norm(attention.q_norm), Norm(attention.k_norm))
        self.out = Projection(attention.o_proj)
        self.mlp_norm = Norm(layer.post_attention_layernorm)
        self.gate_up = Projection(mlp.gate_proj, mlp.up_proj)
        self.down = Projection(mlp.down_proj)


class Decoder:
    """Forward passes with the current weights of `model`, a Hugging Face causal language model.
    Valid until the weights change; on a GPU it stays valid if they change in place.

    If the model is tensor-parallel, all ranks of `parallel` run the same passes. A GPU uses the
    kernels of `rollout.kernels`.
    """

    def __init__(
        self,
        model: HfModule,
        parallel: TensorParallel,
        num_positions: int,
    ) -> None:
        trunk = model.model
        attention = trunk.layers[0].self_attn
        self.num_positions = num_positions
        self._parallel = parallel
        self._embedding: Tensor = trunk.embed_tokens.weight
        self.device = self._embedding.device
        self._by_kernels = self._embedding.is_cuda
        self.skips_unused_rows: bool = self._by_kernels
        """Whether `decode` accepts rows at position -1, which are not used."""
        if self._by_kernels:
            from rolepool.rollout import kernels  # here, because it needs Triton

            self._kernels = kernels
        self._place: Any = None
        """Where the kernels find the cache (`locate`)."""

        self._head_dim: int = attention.head_dim
        self._scale: float = attention.scaling
        # Counted in the weights, because a tensor-parallel rank holds only some of the model's
        # heads.
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._heads = [len(linear.weight) // self._head_dim for linear in projections]
        """The numbers of heads of queries, keys and values."""
        self._num_heads = self._heads[0]
        self._num_kv_heads = self._heads[1]
        self._group_size = self._num_heads // self._num_kv_heads
        self._windows = [
            _window_of_layer(model.config, index) for index in range(len(trunk.layers))
        ]

        self.layers = [Layer(layer) for layer in trunk.layers]
        self._norm = Norm(trunk.norm)
        self.head = Projection(model.lm_head)
        self._activation = trunk.layers[0].mlp.act_fn
        self._has_silu_kernel = self._by_kernels and model.config.hidden_act == "silu"

        positions = torch.arange(num_positions, device=self.device)
        cos, sin = trunk.rotary_emb(self._embedding, positions[None])
        half = self._head_dim // 2
        # Tables of (positions, head_dim). Half of the sines are negated, so that rotating is a roll
        # of the axis.
        self._cos = cos[0]
        self._signed_sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def locate(self, cache: SlotCache) -> None:
        """Tell the kernels where the cache is, in a tensor that keeps its address."""
        place = on_device(torch.tensor(cache.place), self.device)
        if self._place is None:
            self._place = place
        else:
            self._place.copy_(place)

    def prefill(
        self,
        cache: SlotCache,
        tokens_t: Tensor,
        pieces: list[Piece],
    ) -> Tensor:
        """Run the packed tokens of `pieces`; the final state (pieces, hidden) of each piece's last
        token."""
        slots, starts, counts = torch.tensor(pieces).T
        ends = counts.cumsum(0)
        # The position of a token is its number among the packed tokens, counted from the first
        # token of its piece, plus the position at which the piece starts.
        first_numbers = ends - counts
        positions = torch.arange(len(tokens_t))
        positions += (starts - first_numbers).repeat_interleave(counts)
        slots_of_tokens = slots.repeat_interleave(counts)
        positions_t = on_device(positions, tokens_t.device)
        slots_t = on_device(slots_of_tokens, tokens_t.device)
        last = on_device(ends - 1, tokens_t.device)
        starts_whole = not starts.any()
        if starts_whole and self._has_flash(cache):
            attention = self._flash_attention(counts)
        else:
            attention = self._prefill_attention(cache, pieces)
        return self._run(cache, tokens_t, positions_t, slots_t, attention)[last]

    def _has_flash(self, cache: SlotCache) -> bool:
        """Whether flash attention computes heads of this size and dtype."""
        head_dim = cache.shape.head_dim
        fits = head_dim % 8 == 0 and head_dim <= _MAX_FLASH_HEAD_DIM
        return self._by_kernels and cache.shape.dtype.itemsize == 2 and fits

    def decode(
        self,
        cache: SlotCache,
        tokens_b: Tensor,
        positions_b: Tensor,
        slots_b: Tensor,
        length: int,
    ) -> Tensor:
        """Run one token of each row; the final states (rows, hidden). With kernels a row may use
        any slot, and none at position -1. Otherwise row i uses slot i, and all positions are less
        than `length`."""

        def attend(
            index: int,
            queries_bhd: Tensor,
            _keys: Tensor,
            _values: Tensor,
        ) -> Tensor:
            where = (positions_b, slots_b, self._place, index)
            attended_te: Tensor = self._kernels.attend(
                queries_bhd,
                num_kv_heads=self._num_kv_heads,
                where=where,
                window=self._windows[index],
                scale=self._scale,
            )
            return attended_te

        attention: Attention = attend
        if not self._by_kernels:
            attention = self._decode_attention(cache, positions_b, length)
        return self._run(cache, tokens_b, positions_b, slots_b, attention)

    def _run(
        self,
        cache: SlotCache,
        tokens_t: Tensor,
        positions_t: Tensor,
        slots_t: Tensor,
        attention: Attention,
    ) -> Tensor:
        """Run all layers. Each layer's second addition already applies the norm of the next layer,
        because one kernel does both."""
        store = self._storing(cache, positions_t, slots_t)
        x_te = F.embedding(tokens_t, self._embedding)
        normed_te = self.layers[0].input_norm(x_te)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self._norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            qkv_thd = layer.qkv(normed_te).unflatten(1, (-1, self._head_dim))
            if layer.head_norms is not None:
                q_norm, k_norm = layer.head_norms
                queries_thd, keys_thd, values_thd = qkv_thd.split(self._heads, dim=1)
                qkv_thd = torch.cat((q_norm(queries_thd), k_norm(keys_thd), values_thd), dim=1)
            queries_thd, keys_thd, values_thd = store(index, qkv_thd)
            attended_te = attention(index, queries_thd, keys_thd, values_thd)
            delta_te = self._parallel.sum(layer.out(attended_te))
            x_te, normed_te = self._add_norm(x_te, delta_te, layer.mlp_norm)

            inner_te = self._gate(layer.gate_up(normed_te))
            delta_te = self._parallel.sum(layer.down(inner_te))
            x_te, normed_te = self._add_norm(x_te, delta_te, next_norm)
        return normed_te

    def _add_norm(
        self,
        x_te: Tensor,
        delta_te: Tensor,
        norm: Norm,
    ) -> tuple[Tensor, Tensor]:
        """The sum, and its norm. The kernel adds in place."""
        if self._by_kernels:
            normed_te = self._kernels.add_norm(x_te, delta_te, norm.weight, norm.eps)
            return x_te, normed_te
        x_te = x_te + delta_te
        return x_te, norm(x_te)

    def _gate(self, gate_up_te: Tensor) -> Tensor:
        """From concatenated gates and inner features to gated features."""
        if self._has_silu_kernel:
            return self._kernels.silu_gate(gate_up_te)
        gates_te, up_te = gate_up_te.chunk(2, dim=-1)
        gated_te: Tensor = self._activation(gates_te) * up_te
        return gated_te

    def _storing(
        self,
        cache: SlotCache,
        positions_t: Tensor,
        slots_t: Tensor,
    ) -> Store:
        """The function that rotates and stores the tokens at these positions of these slots."""

        def store_by_kernel(index: int, qkv_thd: Tensor) -> tuple[Tensor, ...]:
            where = (positions_t, slots_t, self._place, index)
            self._kernels.rotate_and_store(
                qkv_thd,
                self._num_heads,
                self._cos,
                self._signed_sin,
                where,
            )
            return tuple(qkv_thd.split(self._heads, dim=1))

        if self._by_kernels:
            return store_by_kernel

        cos_t1d = self._cos[positions_t][:, None]
        sin_t1d = self._signed_sin[positions_t][:, None]
        places = cache.places(slots_t, positions_t)

        def store(index: int, qkv_thd: Tensor) -> tuple[Tensor, ...]:
            # Queries and keys are rotated together, which takes half as many operations.
            qk_thd = qkv_thd[:, : -self._num_kv_heads]
            values_thd = qkv_thd[:, -self._num_kv_heads :]
            rolled_thd = qk_thd.roll(self._head_dim // 2, dims=-1)
            rotated_thd = torch.addcmul(qk_thd * cos_t1d, rolled_thd, sin_t1d)
            queries_thd = rotated_thd[:, : self._num_heads]
            keys_thd = rotated_thd[:, self._num_heads :]
            cache.write(index, places, keys_thd, values_thd)
            return queries_thd, keys_thd, values_thd

        return store

    def _flash_attention(self, counts: Tensor) -> Attention:
        """Whole prompts of `counts` tokens, packed, without padding or repeated keys."""
        ends_n = on_device(F.pad(counts.cumsum(0), (1, 0)).int(), self.device)
        longest = int(counts.max())

        def attend(
            index: int,
            queries_thd: Tensor,
            keys_thd: Tensor,
            values_thd: Tensor,
        ) -> Tensor:
            window = {}
            if self._windows[index] < longest:
                window = {"window_size_left": self._windows[index] - 1, "window_size_right": 0}
            # The operator itself, because its public function accepts grouped queries only in some
            # versions of torch.
            outputs_thd: Tensor = torch.ops.aten._flash_attention_forward(
                queries_thd,
                keys_thd,
                values_thd,
                cum_seq_q=ends_n,
                cum_seq_k=ends_n,
                max_q=longest,
                max_k=longest,
                dropout_p=0.0,
                is_causal=True,
                return_debug_mask=False,
                scale=self._scale,
                **window,
            )[0]
            return outputs_thd.flatten(1)

        return attend

    def _decode_attention(
        self,
        cache: SlotCache,
        positions_b: Tensor,
        length: int,
    ) -> Attention:
        """Queries of a group use the axis of positions, so that keys are read once and not
        repeated."""
        num_rows = len(positions_b)
        slots = slice(0, num_rows)
        masks = {}
        for window in set(self._windows):
            mask_bl = _mask(positions_b, length, window, self._cos.dtype)
            masks[window] = mask_bl[:, None, None].repeat(1, 1, self._group_size, 1)

        def attend(
            index: int,
            queries_bhd: Tensor,
            _keys: Tensor,
            _values: Tensor,
        ) -> Tensor:
            queries_bhgd = queries_bhd.unflatten(1, (-1, self._group_size))
            keys_bhld, values_bhld = cache.read(index, slots, length)
            mask = masks[self._windows[index]]
            outputs_bhgd = F.scaled_dot_product_attention(
                queries_bhgd,
                keys_bhld,
                values_bhld,
                mask,
                scale=self._scale,
            )
            return outputs_bhgd.reshape(num_rows, -1)

        return attend

    def _prefill_attention(self, cache: SlotCache, pieces: list[Piece]) -> Attention:
        """Adjacent pieces with the same start and length are computed in one call, without
        padding."""
        groups = _group_alike(pieces)
        sizes = [len(group) * group[0].num_tokens for group in groups]
        masks: dict[tuple[Piece, int], Tensor | None] = {}
        """By the first piece of a group and the window. Without a mask attention is causal."""
        for first, *_ in groups:
            end = first.start + first.num_tokens
            positions_t = torch.arange(first.start, end, device=self.device)
            for window in set(self._windows):
                masks[first, window] = None
                if first.start > 0 or window < end:
                    masks[first, window] = _mask(positions_t, end, window, self._cos.dtype)

        def attend(
            index: int,
            queries_thd: Tensor,
            _keys: Tensor,
            _values: Tensor,
        ) -> Tensor:
            outputs = []
            for group, queries in zip(groups, queries_thd.split(sizes), strict=True):
                first = group[0]
                mask = masks[first, self._windows[index]]
                slots = slice(first.slot, first.slot + len(group))
                queries_nhtd = queries.unflatten(0, (len(group), -1)).transpose(1, 2)
                end = first.start + first.num_tokens
                keys_nhld, values_nhld = cache.read(index, slots, end)
                outputs_nhtd = F.scaled_dot_product_attention(
                    queries_nhtd,
                    keys_nhld,
                    values_nhld,
                    mask,
                    is_causal=mask is None,
                    scale=self._scale,
                    enable_gqa=self._group_size > 1,
                )
                outputs.append(outputs_nhtd.transpose(1, 2).flatten(2).flatten(0, 1))
            return torch.cat(outputs)

        return attend


def _group_alike(pieces: list[Piece]) -> list[list[Piece]]:
    """Groups of adjacent pieces in adjacent slots that have the same start and length."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        last = groups[-1][-1] if groups else None
        if last is not None and piece == last._replace(slot=last.slot + 1):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def refuse_unknown(model: HfModule) -> None:
    """Raise an error unless `Decoder` can run this kind of model, with plain linear layers."""
    if (reason := why_not_run("native", model.config.to_dict())) is not None:
        raise ConfigError(
            f"actor_rollout_ref.model.path={model.config.name_or_path}: {reason}; "
            "choose such a model"
        )
    for name, module in model.named_modules():
        is_projection = name.endswith("_proj") or name == "lm_head"
        # The `weight` of a projection with an adapter, or of a quantized one, does not tell what it
        # computes.
        if is_projection and type(module).forward is not nn.Linear.forward:
            problem = (
                "the native rollout engine needs plain linear layers; "
                f"{name} is a {type(module).__name__}"
            )
            raise RolepoolError(f"{problem}. Merge adapters into the weights first")


def cache_shape(model: HfModule) -> CacheShape:
    """The shape of the cache for the model as it is now. A tensor-parallel rank holds only some of
    the heads."""
    attention = model.model.layers[0].self_attn
    embedding = model.model.embed_tokens.weight
    return CacheShape(
        num_layers=len(model.model.layers),
        num_heads=len(attention.k_proj.weight) // attention.head_dim,
        head_dim=attention.head_dim,
        dtype=embedding.dtype,
        device=embedding.device,
    )


def _window_of_layer(config: HfConfig, index: int) -> int:
    """Number of tokens that a token attends to, including itself. Mistral has a window in all
    layers or in none, Qwen in some layers, Llama never."""
    if config.model_type == "llama":
        return UNLIMITED
    is_qwen = config.model_type in ("qwen2", "qwen3")
    if is_qwen and config.layer_types[index] != "sliding_attention":
        return UNLIMITED
    return config.sliding_window or UNLIMITED


def _mask(
    positions_t: Tensor,
    length: int,
    window: int,
    dtype: torch.dtype,
) -> Tensor:
    """The mask (positions, length) to add to scores: -inf for tokens that the token at a position
    does not attend to, of the first `length` tokens."""
    seen_l = torch.arange(length, device=positions_t.device)
    own_t1 = positions_t[:, None]
    is_hidden_tl = seen_l > own_t1
    if window < length:
        is_hidden_tl |= seen_l <= own_t1 - window
    return torch.zeros_like(is_hidden_tl, dtype=dtype).masked_fill_(is_hidden_tl, -torch.inf)


@torch.no_grad()
def join_weights(model: HfModule) -> None:
    """Store weights that are applied to the same input in one tensor, so that they are used as one
    matrix. They stay separate parameters, which are still updated in place."""
    for layer in model.model.layers:
        attention = layer.self_attn
        mlp = layer.mlp
        for linears in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (mlp.gate_proj, mlp.up_proj),
        ):
            _store_together([linear.weight for linear in linears])
            if linears[0].bias is not None:
                _store_together([linear.bias for linear in linears])


def _store_together(parameters: list[Tensor]) -> None:
    """Move parameters into one tensor, unless they are in one already."""
    if _joined(parameters) is not None:
        return
    joint = torch.cat([parameter.data for parameter in parameters])
    views = joint.split([len(parameter) for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view


def _joined(parts: list[Tensor], *, or_copy: bool = False) -> Tensor | None:
    """One tensor over parts that follow each other in one storage; otherwise a copy, or None."""
    storages = {part.untyped_storage().data_ptr() for part in parts}
    are_adjacent = all(
        following.data_ptr() == part.data_ptr() + part.nbytes for part, following in pairwise(parts)
    )
    are_contiguous = all(part.is_contiguous() for part in parts)
    if len(storages) == 1 and are_adjacent and are_contiguous:
        first = parts[0].detach()
        shape = (sum(map(len, parts)), *first.shape[1:])
        return first.as_strided(shape, first.stride())
    if or_copy:
        return torch.cat(parts)
    return None
