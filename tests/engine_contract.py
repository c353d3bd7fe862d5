"""What every engine must do, as checks that take an engine. They do not know any engine.

`check_engine` is the whole contract; `check_weight_updates` is its part about new weights.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rolepool.errors import DataError, RolepoolError
from rolepool.rollout.engine import Completion, Engine, Request, Sampling
from rolepool.rollout.sampling import filter_logits

ROUNDING = 1e-4
"""How far apart rounding may bring logits, probabilities and log-probs of float32 models; 7e-6 has
been seen."""
_PERTURBATION = 0.1
"""Of every weight, as a fraction of its tensor's mean size: enough to move log-probs far beyond any
tolerance."""


def check_engine(
    engine: Engine, model: nn.Module, requests: Sequence[Request], tolerance: float = ROUNDING
) -> None:
    """Raise AssertionError unless `engine`, which has the weights of `model`, keeps the whole
    contract. `tolerance` is how far its log-probs may be from those of a trainer's forward."""
    from same_tokens import (
        assert_same_completions,
        assert_same_tokens,
        token_ids,
    )  # it imports this module

    greedy = Sampling(
        1.0, 1.0, -1, do_sample=False, max_new_tokens=20, ignore_eos=True, stop_token_ids=()
    )
    sampled = dataclasses.replace(greedy, do_sample=True)
    filtered = dataclasses.replace(sampled, temperature=0.7, top_k=20, top_p=0.9)

    # Greedy tokens are those of transformers; log-probs are those of a trainer's forward.
    free = engine.generate(requests, greedy)
    assert_same_tokens(
        model,
        requests,
        greedy,
        token_ids(free),
        [_generated(model, one, greedy) for one in requests],
    )
    for sampling in (greedy, sampled, filtered):
        difference = largest_difference(
            model, requests, engine.generate(requests, sampling), sampling
        )
        assert difference < tolerance, f"log-probs are {difference:.1e} from the trainer's forward"

    # A stop token ends a response and belongs to it, unless it is ignored.
    stops = (int(free[0].token_ids[3]), int(free[4].token_ids[6]))
    stopping = dataclasses.replace(greedy, ignore_eos=False, stop_token_ids=stops)
    stopped = engine.generate(requests, stopping)
    ends = [
        next((place + 1 for place, token in enumerate(one) if token in stops), None)
        for one in token_ids(free)
    ]
    cut = [one[:end] for one, end in zip(token_ids(free), ends, strict=True)]
    assert_same_tokens(model, requests, greedy, token_ids(stopped), cut)
    assert all(
        one.finish_reason == ("stop" if one.token_ids[-1] in stops else "length") for one in stopped
    )
    assert {one.finish_reason for one in stopped} == {"stop", "length"}
    ignoring = engine.generate(requests, dataclasses.replace(stopping, ignore_eos=True))
    assert_same_tokens(model, requests, greedy, token_ids(ignoring), token_ids(free))

    # A sample depends on its seed, and not on its batch.
    same_prompt = [
        dataclasses.replace(requests[3], seed=seed, max_new_tokens=20) for seed in range(6)
    ]
    samples = engine.generate(same_prompt, sampled)
    assert len(set(map(tuple, token_ids(samples)))) == 6
    if "per_sample_seeds" in engine.abilities:
        together = engine.generate(requests, sampled)
        alone = [engine.generate([request], sampled)[0] for request in requests]
        assert_same_completions(model, requests, sampled, alone, together)
        assert_same_completions(
            model, requests, sampled, engine.generate(requests[::-1], sampled)[::-1], together
        )

        # Turns that join a session say what one call says.
        short = [
            dataclasses.replace(one, token_ids=one.token_ids[:9], max_new_tokens=6)
            for one in requests
        ]
        turns, said = in_turns(engine, short, sampled, len(short))
        assert_same_completions(model, turns, sampled, said, engine.generate(turns, sampled))

    # An engine that sleeps does not generate, and generates the same when it wakes up.
    engine.sleep()
    with pytest.raises(RolepoolError, match="asleep"):
        engine.generate(requests, greedy)
    engine.wake()
    assert_same_completions(model, requests, greedy, engine.generate(requests, greedy), free)
    assert engine.generate([], greedy) == []

    # New weights are checked, and used.
    whole = {} if engine.shared_weights else dict(model.state_dict())
    name, tensor = next(iter(whole.items()), ("", torch.zeros(0)))
    broken = {
        "missing": {},
        "not a weight": {"model.norm.wait": tensor},
        "has shape": {name: tensor[:1]},
    }
    for complaint, named in broken.items() if whole else ():
        with pytest.raises(DataError, match=complaint):
            engine.update_weights(named.items(), engine.version + 1)
        with pytest.raises(RolepoolError, match="failed halfway"):
            engine.generate(requests, greedy)
        engine.update_weights(whole.items(), engine.version + 1)
    engine.sleep()  # weights may also come to a sleeping engine
    engine.update_weights(whole.items(), engine.version + 1)
    engine.wake()
    for sampling in (sampled, greedy):
        check_weight_updates(engine, model, requests, sampling, tolerance)


def in_turns(
    engine: Engine, first: Sequence[Request], sampling: Sampling, num_rows: int
) -> tuple[list[Request], list[Completion]]:
    """The requests and completions of conversations of three turns in one session. A turn joins as
    soon as the one before it has ended. Conversation 3 changes its earlier tokens."""
    numbers, asked, ended = random.Random(1), dict[int, Request](), dict[int, Completion]()
    first = [
        dataclasses.replace(request, conversation=index) for index, request in enumerate(first)
    ]
    longest = (
        max(
            len(one.token_ids) + 3 * (one.max_new_tokens or sampling.max_new_tokens)
            for one in first
        )
        + 8
    )
    with engine.session(sampling, num_rows, longest) as session:
        asked.update(zip(session.submit(first), first, strict=True))
        while len(ended) < 3 * len(first):
            for number, completion in session.step():
                ended[number], request = completion, asked[number]
                if (
                    len([one for one in asked.values() if one.conversation == request.conversation])
                    < 3
                ):
                    ids = [
                        *request.token_ids,
                        *completion.token_ids.tolist(),
                        *numbers.choices(range(16), k=4),
                    ]
                    ids[0] = (ids[0] + 1) % 16 if request.conversation == 3 else ids[0]
                    turn = dataclasses.replace(request, token_ids=ids, seed=request.seed + 1)
                    asked.update(zip(session.submit([turn]), [turn], strict=True))
    return list(asked.values()), [ended[number] for number in asked]


def _generated(model: Any, request: Request, sampling: Sampling) -> list[int]:
    """The tokens of `generate` of transformers."""
    ids = torch.tensor([list(request.token_ids)])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    num_new = request.max_new_tokens or sampling.max_new_tokens
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, **options
    )
    return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def check_weight_updates(
    engine: Engine,
    model: nn.Module,
    requests: Sequence[Request],
    sampling: Sampling,
    tolerance: float = ROUNDING,
) -> float:
    """Raise AssertionError unless `engine` generates with the weights of `model` after each of two
    updates.

    `model` is the trainer's, of the same architecture (the engine's own where weights are shared);
    its weights are changed between the updates, and the same prompts are generated again. An engine
    that answers from anything it computed before the update gives itself away. Returns the largest
    difference in log-probs.
    """
    worst = 0.0
    before: list[Completion] = []
    for version in (engine.version + 1, engine.version + 2):
        if before:
            perturb_weights(model, seed=version)
            stale = largest_difference(model, requests, before, sampling)
            if stale <= 10 * tolerance:
                raise AssertionError(
                    f"the check is blind: changing the weights moved log-probs by {stale:.1e} only"
                )
        named = () if engine.shared_weights else model.state_dict().items()
        engine.update_weights(named, version)
        if engine.version != version:
            raise AssertionError(
                f"after an update to version {version} the engine says {engine.version}"
            )
        before = engine.generate(requests, sampling)
        versions = {completion.weights_version for completion in before}
        if versions != {version}:
            raise AssertionError(f"samples of version {version} carry {sorted(versions)}")
        difference = largest_difference(model, requests, before, sampling)
        if not difference < tolerance:
            raise AssertionError(
                f"log-probs of version {version} are {difference:.1e} from the trainer's forward"
            )
        worst = max(worst, difference)
    return worst


def largest_difference(
    model: nn.Module,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sampling: Sampling,
) -> float:
    """Between log-probs of completions and those of a plain forward of `model`.

    If rounding decides whether top-p keeps a token, the nearer of the two results counts.
    """
    changes = (0.0,) if sampling.top_p == 1 else (-ROUNDING, 0.0, ROUNDING)
    samplings = [dataclasses.replace(sampling, top_p=sampling.top_p + change) for change in changes]
    worst = 0.0
    for request, completion in zip(requests, completions, strict=True):
        expected_st = torch.stack(
            [forward_log_probs(model, request, completion, each) for each in samplings]
        )
        differences_t = (expected_st - torch.tensor(completion.log_probs)).abs().amin(dim=0)
        worst = max(worst, float(differences_t.max()))
    return worst


def forward_log_probs(
    model: nn.Module, request: Request, completion: Completion, sampling: Sampling
) -> Tensor:
    """Log-probs of a completion's tokens, by one forward of the whole sequence, without a cache."""
    logits_tv = forward_logits(model, request, completion.token_ids)
    if not sampling.is_greedy:
        logits_tv = filter_logits(logits_tv, sampling)
    log_probs_t: Tensor = logits_tv.log_softmax(dim=-1).gather(
        1, torch.tensor(completion.token_ids)[:, None]
    )[:, 0]
    return log_probs_t


@torch.no_grad()
def forward_logits(model: nn.Module, request: Request, token_ids: Sequence[int]) -> Tensor:
    """Logits from which each of these tokens of a response was chosen, by one forward of the whole
    sequence."""
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
