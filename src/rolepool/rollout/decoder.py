"""The forward pass of a Hugging Face decoder on packed tokens and a slot cache: no padding, one row
per token.

Owns how the layers of Llama-, Mistral-, Qwen2- and Qwen3-like models are computed, with the model's
own weights, activation and rotary tables. Does not know about requests, sampling or scheduling.
"""

from collections.abc import Callable, Sequence
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

Mix = Callable[[int, Tensor], Tensor]
"""From a layer's index and concatenated queries, keys and values (tokens, all heads, head_dim),
before norms and rotary embedding, to the outputs of attention (tokens, heads * head_dim). Keys and
values are stored in the cache."""
Store = Callable[[int, Tensor], tuple[Tensor, ...]]
"""From the same to queries, keys and values, after norms and rotary embedding; keys and values are
stored in the cache."""
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
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        self._parts: list[tuple[Tensor, Tensor | None]]
        """Weight and bias of each matrix product."""
        self._parts = list(zip(weights, biases, strict=True))
        may_copy = not weights[0].is_cuda
        has_bias = biases[0] is not None
        weight = _joined(weights, or_copy=may_copy)
        bias = None
        if has_bias:
            bias = _joined(biases, or_copy=may_copy)
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
        self.qkv = Projection(
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
        )
        self.head_norms: tuple[Norm, Norm] | None = None
        """Norms of queries and keys; only Qwen3 has them."""
        if hasattr(attention, "q_norm"):
            q_norm = Norm(attention.q_norm)
            k_norm = Norm(attention.k_norm)
            self.head_norms = (q_norm, k_norm)
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
        self._heads: list[int] = []
        """The numbers of heads of queries, keys and values."""
        for linear in projections:
            num_outputs = len(linear.weight)
            self._heads.append(num_outputs // self._head_dim)
        self._num_heads = self._heads[0]
        self._num_kv_heads = self._heads[1]
        self._group_size = self._num_heads // self._num_kv_heads
        indices = range(len(trunk.layers))
        self._windows = [_window_of_layer(model.config, index) for index in indices]

        self.layers = [Layer(layer) for layer in trunk.layers]
        self._norm = Norm(trunk.norm)
        self.head = Projection(model.lm_head)
        self._activation = trunk.layers[0].mlp.act_fn
        self._has_silu_kernel = self._by_kernels and model.config.hidden_act == "silu"

        positions = torch.arange(num_positions, device=self.device)
        cos, sin = trunk.rotary_emb(self._embedding, positions[None])
        # Tables of (positions, head_dim). Half of the sines are negated, so that rotating is a roll
        # of the axis.
        half = self._head_dim // 2
        lower_sin = sin[0, :, :half]
        upper_sin = sin[0, :, half:]
        self._cos = cos[0]
        self._signed_sin = torch.cat((-lower_sin, upper_sin), dim=-1)
        if self._by_kernels:
            self._heads_of_kernels = self._kernels.Heads(
                num_queries=self._num_heads,
                num_keys=self._num_kv_heads,
                cos=self._cos,
                signed_sin=self._signed_sin,
                counters=self._kernels.make_counters(self.device),
            )

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
        shifts = starts - first_numbers
        positions = torch.arange(len(tokens_t))
        positions += shifts.repeat_interleave(counts)
        slots_of_tokens = slots.repeat_interleave(counts)
        positions_t = on_device(positions, tokens_t.device)
        slots_t = on_device(slots_of_tokens, tokens_t.device)
        last = on_device(ends - 1, tokens_t.device)
        starts_whole = not starts.any()
        if starts_whole and self._has_flash(cache):
            attention = self._flash_attention(counts)
        else:
            attention = self._prefill_attention(cache, pieces)
        store = self._storing(cache, positions_t, slots_t)
        states_te = self._run(tokens_t, _mixing(store, attention))
        return states_te[last]

    def _has_flash(self, cache: SlotCache) -> bool:
        """Whether flash attention computes heads of this size and dtype."""
        head_dim = cache.shape.head_dim
        has_16_bits = cache.shape.dtype.itemsize == 2
        fits = head_dim % 8 == 0 and head_dim <= _MAX_FLASH_HEAD_DIM
        return self._by_kernels and has_16_bits and fits

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

        if self._by_kernels:
            return self._run(tokens_b, self._mixing_by_kernel(positions_b, slots_b))
        store = self._storing(cache, positions_b, slots_b)
        attention = self._decode_attention(cache, positions_b, length)
        return self._run(tokens_b, _mixing(store, attention))

    def _mixing_by_kernel(self, positions_b: Tensor, slots_b: Tensor) -> Mix:
        """One kernel for one token of each row, from norms to attention."""

        def mix(index: int, qkv_bhd: Tensor) -> Tensor:
            attended_te: Tensor = self._kernels.attend(
                qkv_bhd,
                self._heads_of_kernels,
                self._norms_of_kernels(index),
                where=(positions_b, slots_b, self._place, index),
                window=self._windows[index],
                scale=self._scale,
            )
            return attended_te

        return mix

    def _run(self, tokens_t: Tensor, mix: Mix) -> Tensor:
        """Run all layers. Each layer's second addition already applies the norm of the next layer,
        because one kernel does both."""
        x_te = F.embedding(tokens_t, self._embedding)
        normed_te = self.layers[0].input_norm(x_te)
        next_norms = [layer.input_norm for layer in self.layers[1:]]
        next_norms.append(self._norm)
        layers = zip(self.layers, next_norms, strict=True)
        for index, (layer, next_norm) in enumerate(layers):
            qkv_thd = layer.qkv(normed_te).unflatten(1, (-1, self._head_dim))
            delta_te = self._parallel.sum(layer.out(mix(index, qkv_thd)))
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
            normed_te = self._kernels.add_norm(
                x_te,
                delta_te,
                norm.weight,
                norm.eps,
            )
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

    def _norms_of_kernels(self, index: int) -> tuple[Tensor, Tensor, float] | None:
        """The norms of a layer's queries and keys."""
        head_norms = self.layers[index].head_norms
        if head_norms is None:
            return None
        q_norm, k_norm = head_norms
        return q_norm.weight, k_norm.weight, q_norm.eps

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
                self._heads_of_kernels,
                self._norms_of_kernels(index),
                where,
            )
            return tuple(qkv_thd.split(self._heads, dim=1))

        if self._by_kernels:
            return store_by_kernel

        cos_t1d = self._cos[positions_t][:, None]
        sin_t1d = self._signed_sin[positions_t][:, None]
        places = cache.places(slots_t, positions_t)
        half = self._head_dim // 2
        first_key = self._num_heads
        first_value = self._num_heads + self._num_kv_heads

        def store(index: int, qkv_thd: Tensor) -> tuple[Tensor, ...]:
            head_norms = self.layers[index].head_norms
            if head_norms is not None:
                q_norm, k_norm = head_norms
                queries_thd, keys_thd, values_thd = qkv_thd.split(self._heads, dim=1)
                qkv_thd = torch.cat((q_norm(queries_thd), k_norm(keys_thd), values_thd), dim=1)
            # Queries and keys are rotated together, which takes half as many operations.
            qk_thd = qkv_thd[:, :first_value]
            values_thd = qkv_thd[:, first_value:]
            rolled_thd = qk_thd.roll(half, dims=-1)
            scaled_thd = qk_thd * cos_t1d
            rotated_thd = torch.addcmul(scaled_thd, rolled_thd, sin_t1d)
            queries_thd = rotated_thd[:, :first_key]
            keys_thd = rotated_thd[:, first_key:]
            cache.write(index, places, keys_thd, values_thd)
            return queries_thd, keys_thd, values_thd

        return store

    def _flash_attention(self, counts: Tensor) -> Attention:
        """Whole prompts of `counts` tokens, packed, without padding or repeated keys."""
        ends = F.pad(counts.cumsum(0), (1, 0))
        ends_n = on_device(ends.int(), self.device)
        longest = int(counts.max())

        def attend(
            index: int,
            queries_thd: Tensor,
            keys_thd: Tensor,
            values_thd: Tensor,
        ) -> Tensor:
            window = self._windows[index]
            window_sizes = {}
            if window < longest:
                window_sizes["window_size_left"] = window - 1
                window_sizes["window_size_right"] = 0
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
                **window_sizes,
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
            mask_b11l = mask_bl[:, None, None]
            masks[window] = mask_b11l.repeat(1, 1, self._group_size, 1)

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
        sizes = []
        for group in groups:
            sizes.append(len(group) * group[0].num_tokens)
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
            window = self._windows[index]
            queries_of_groups = queries_thd.split(sizes)
            for group, queries in zip(groups, queries_of_groups, strict=True):
                first = group[0]
                mask = masks[first, window]
                num_prompts = len(group)
                slots = slice(first.slot, first.slot + num_prompts)
                queries_nthd = queries.unflatten(0, (num_prompts, -1))
                queries_nhtd = queries_nthd.transpose(1, 2)
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
                outputs_nte = outputs_nhtd.transpose(1, 2).flatten(2)
                outputs.append(outputs_nte.flatten(0, 1))
            return torch.cat(outputs)

        return attend


def _mixing(store: Store, attention: Attention) -> Mix:
    """First store, then attend."""

    def mix(index: int, qkv_thd: Tensor) -> Tensor:
        queries_thd, keys_thd, values_thd = store(index, qkv_thd)
        return attention(index, queries_thd, keys_thd, values_thd)

    return mix


def _group_alike(pieces: list[Piece]) -> list[list[Piece]]:
    """Groups of adjacent pieces in adjacent slots that have the same start and length."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups:
            last_group = groups[-1]
            last = last_group[-1]
            next_alike = last._replace(slot=last.slot + 1)
            if piece == next_alike:
                last_group.append(piece)
                continue
        groups.append([piece])
    return groups


def refuse_unknown(model: HfModule) -> None:
    """Raise an error unless `Decoder` can run this kind of model, with plain linear layers."""
    reason = why_not_run("native", model.config.to_dict())
    if reason is not None:
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
    layers = model.model.layers
    attention = layers[0].self_attn
    embedding = model.model.embed_tokens.weight
    return CacheShape(
        num_layers=len(layers),
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
    zeros_tl = torch.zeros_like(is_hidden_tl, dtype=dtype)
    return zeros_tl.masked_fill_(is_hidden_tl, -torch.inf)


@torch.no_grad()
def join_weights(model: HfModule) -> None:
    """Store weights that are applied to the same input in one tensor, so that they are used as one
    matrix. They stay separate parameters, which are still updated in place."""
    for layer in model.model.layers:
        attention = layer.self_attn
        mlp = layer.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up = (mlp.gate_proj, mlp.up_proj)
        for linears in (qkv, gate_up):
            _store_together([linear.weight for linear in linears])
            if linears[0].bias is not None:
                _store_together([linear.bias for linear in linears])


def _store_together(parameters: list[Tensor]) -> None:
    """Move parameters into one tensor, unless they are in one already."""
    if _joined(parameters) is not None:
        return
    joint = torch.cat([parameter.data for parameter in parameters])
    lengths = [len(parameter) for parameter in parameters]
    views = joint.split(lengths)
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view


def _joined(parts: Sequence[Tensor], *, or_copy: bool = False) -> Tensor | None:
    """One tensor over parts that follow each other in one storage; otherwise a copy, or None."""
    if _are_one_block(parts):
        first = parts[0].detach()
        total_length = sum(map(len, parts))
        shape = (total_length, *first.shape[1:])
        return first.as_strided(shape, first.stride())
    if or_copy:
        return torch.cat(list(parts))
    return None


def _are_one_block(parts: Sequence[Tensor]) -> bool:
    """Whether the parts follow each other in one storage, without gaps."""
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(storages) != 1:
        return False
    for part, following in pairwise(parts):
        end = part.data_ptr() + part.nbytes
        if following.data_ptr() != end:
            return False
    return all(part.is_contiguous() for part in parts)
