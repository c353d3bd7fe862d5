"""A model in training: optimizer, learning rate, and one exact optimizer step per mini-batch.

Owns gradient accumulation, clipping, schedule and offload. The caller passes the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rolepool.config.model_keys import FsdpConfig, OptimConfig
from rolepool.errors import RolepoolError
from rolepool.models.sharding import add_up_replicas, clip_gradients, free_gathered, shard
from rolepool.protocol.parts import part

LossOf = Callable[[Sequence[int]], tuple[Tensor, dict[str, Tensor]]]
"""The loss of some rows and its metrics, as shares that add up to the values of the whole mini-batch."""


class TrainedModel:
    """A model, its AdamW and its learning rate."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: str,
        optim: OptimConfig,
        fsdp: FsdpConfig,
        grad_clip: float,
        num_training_steps: int,
        checkpointing: bool,
    ) -> None:
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        self.device = device
        self.model = shard(model, device, fsdp.fsdp_size)
        self.optim = optim
        self.grad_clip = grad_clip
        self.num_training_steps = num_training_steps
        self.num_updates = 0
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            fused=device == "cuda",
        )
        self._failed: BaseException | None = None
        self._offload = (fsdp.param_offload, fsdp.optimizer_offload)
        self._leave_device()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update: linear warm-up, then constant or a cosine down to min_lr_ratio."""
        step, warmup = self.num_updates, self._num_warmup_steps
        if step < warmup:
            return self.optim.lr * (step + 1) / warmup
        if self.optim.lr_scheduler_type == "constant":
            return self.optim.lr
        done = min(1.0, (step - warmup) / max(1, self.num_training_steps - warmup))
        lowest = self.optim.min_lr_ratio
        return self.optim.lr * (lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * done)))

    @property
    def _num_warmup_steps(self) -> int:
        if self.optim.lr_warmup_steps >= 0:
            return self.optim.lr_warmup_steps
        return int(self.optim.lr_warmup_steps_ratio * self.num_training_steps)

    def step(self, micro_batches: Sequence[Sequence[int]], loss_of: LossOf) -> dict[str, Tensor]:
        """One optimizer step on a mini-batch, given as the rows of each micro-batch on this rank.

        Metrics are this rank's shares, and `grad_norm` of the whole pool; if that is not finite, the update is skipped.
        They stay on the device, because reading them would wait for the device and leave it idle until the next work.
        """
        self.model.train()
        totals: dict[str, Tensor] = {}
        for number, rows in enumerate(micro_batches):
            add_up_replicas(self.model, number == len(micro_batches) - 1)
            with part("forward"):
                loss, metrics = loss_of(rows)
            with part("backward"):
                loss.backward()
            for name, share in metrics.items():
                totals[name] = share.double() + totals.get(name, 0.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        with part("optimizer"):
            norm = clip_gradients(self.model, self.grad_clip)
            self._step_unless(~norm.isfinite())
            self.optimizer.zero_grad(set_to_none=True)
        return {**totals, "grad_norm": norm.double()}

    def _step_unless(self, bad: Tensor) -> None:
        if self.device == "cuda":
            # The fused kernel reads this flag, and changes nothing if it is 1.
            self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not bad:
            self.optimizer.step()

    def recompute_activations(self, now: bool) -> None:
        """Whether backward passes recompute activations; needs `checkpointing`."""
        for module in self.model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = now  # type: ignore[assignment]

    @contextmanager
    def on_device(self, *, training: bool) -> Iterator[nn.Module]:
        """The model on its device inside the block; offloaded tensors return to host memory afterwards.

        If an update fails halfway, the weights are not usable: every later use raises an error, too.
        """
        if self._failed is not None:
            raise RolepoolError(f"an earlier update failed, so these weights cannot be used: {self._failed!r}")
        params_away, optimizer_away = self._offload
        if params_away:
            self.model.to(self.device)
        if optimizer_away and training:
            self._move_optimizer(self.device)
        try:
            yield self.model
        except BaseException as error:
            self._failed = error if training else None
            raise
        finally:
            free_gathered(self.model)
            self._leave_device()

    def _leave_device(self) -> None:
        params_away, optimizer_away = self._offload
        if self.device == "cpu":
            return
        if params_away:
            self.model.to("cpu")
        if optimizer_away:
            self._move_optimizer("cpu")
        if params_away or optimizer_away:
            torch.cuda.empty_cache()

    def _move_optimizer(self, device: str) -> None:
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[name] = value.to(device)
