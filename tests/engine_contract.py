"""What every engine must do when its weights change, as a check that takes an engine.

Does not know any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rolepool.rollout.engine import Completion, Engine, Request, Sampling
from rolepool.rollout.sampling import filter_logits

ROUNDING = 1e-4
"""How far apart rounding may bring logits, probabilities and log-probs of float32 models; 7e-6 has been seen."""
_PERTURBATION = 0.1
"""Of every weight, as a fraction of its tensor's mean size: enough to move log-probs far beyond any tolerance."""


def check_weight_updates(
    engine: Engine, model: nn.Module, requests: Sequence[Request], sampling: Sampling, tolerance: float = ROUNDING
) -> float:
    """Raise AssertionError unless `engine` generates with the weights of `model` after each of two updates.

    `model` is the trainer's, of the same architecture (the engine's own where weights are shared); its weights are
    changed between the updates, and the same prompts are generated again. An engine that answers from anything it
    computed before the update gives itself away. Returns the largest difference in log-probs.
    """
    worst = 0.0
    before: list[Completion] = []
    for version in (engine.version + 1, engine.version + 2):
        if before:
            perturb_weights(model, seed=version)
            stale = largest_difference(model, requests, before, sampling)
            if stale <= 10 * tolerance:
                raise AssertionError(f"the check is blind: changing the weights moved log-probs by {stale:.1e} only")
        named = () if engine.shared_weights else model.state_dict().items()
        engine.update_weights(named, version)
        if engine.version != version:
            raise AssertionError(f"after an update to version {version} the engine says {engine.version}")
        before = engine.generate(requests, sampling)
        versions = {completion.weights_version for completion in before}
        if versions != {version}:
            raise AssertionError(f"samples of version {version} carry {sorted(versions)}")
        difference = largest_difference(model, requests, before, sampling)
        if not difference < tolerance:
            raise AssertionError(f"log-probs of version {version} are {difference:.1e} from the trainer's forward")
        worst = max(worst, difference)
    return worst


def largest_difference(
    model: nn.Module, requests: Sequence[Request], completions: Sequence[Completion], sampling: Sampling
) -> float:
    """Between log-probs of completions and those of a plain forward of `model`.

    If rounding decides whether top-p keeps a token, the nearer of the two results counts.
    """
    changes = (0.0,) if sampling.top_p == 1 else (-ROUNDING, 0.0, ROUNDING)
    samplings = [dataclasses.replace(sampling, top_p=sampling.top_p + change) for change in changes]
    worst = 0.0
    for request, completion in zip(requests, completions, strict=True):
        expected_st = torch.stack([forward_log_probs(model, request, completion, each) for each in samplings])
        differences_t = (expected_st - torch.tensor(completion.log_probs)).abs().amin(dim=0)
        worst = max(worst, float(differences_t.max()))
    return worst


def forward_log_probs(model: nn.Module, request: Request, completion: Completion, sampling: Sampling) -> Tensor:
    """Log-probs of a completion's tokens, by one forward of the whole sequence, without a cache."""
    logits_tv = forward_logits(model, request, completion.token_ids)
    if not sampling.is_greedy:
        logits_tv = filter_logits(logits_tv, sampling)
    log_probs_t: Tensor = logits_tv.log_softmax(dim=-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return log_probs_t


@torch.no_grad()
def forward_logits(model: nn.Module, request: Request, token_ids: Sequence[int]) -> Tensor:
    """Logits from which each of these tokens of a response was chosen, by one forward of the whole sequence."""
    runnable: Any = model
    ids = torch.tensor([[*request.token_ids, *token_ids]], device=runnable.device)
    first = len(request.token_ids) - 1
    logits_tv: Tensor = runnable(input_ids=ids, use_cache=False).logits[0, first:-1].float().cpu()
    return logits_tv


@torch.no_grad()
def perturb_weights(model: nn.Module, seed: int) -> None:
    """Change every weight a little, in place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(noise * parameter.abs().mean() * _PERTURBATION)
