"""Several turns on a real GPU: sessions with CUDA graphs, and runs with the parity check in 16
bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_engines_on_a_gpu import CHECKED, NUM_STEPS
from test_rollout_on_a_gpu import GREEDY, SAMPLED, make_engine, make_model, make_requests
from trainings import Outcome, Training

from engine_contract import in_turns, largest_difference
from rolepool.rollout import Completion, Sampling
from same_tokens import token_ids

pytestmark = pytest.mark.gpu

TURNS = "actor_rollout_ref.rollout.multi_turn"
LOOKUP = "rolepool.recipes.environments.lookup"
CONVERSATIONS = f"""
{CHECKED} {TURNS}.enable=true {TURNS}.max_assistant_turns=3 {TURNS}.max_turn_tokens=2
{TURNS}.format={LOOKUP}:parse_question environment.name={LOOKUP}:Lookup
"""
TRAININGS = {
    "tool_in_one_pool": Training(f"{CONVERSATIONS} placement.strategy=standard"),
    "tool_in_two_pools": Training(
        f"{CONVERSATIONS} placement.strategy=split placement.split.share=0.5"
    ),
}


def assert_nearly_all_equal(got: list[Completion], expected: list[Completion]) -> None:
    """In float32 matrix products of other shapes may round a tie the other way, rarely."""
    num_equal = sum(
        one == other for one, other in zip(token_ids(got), token_ids(expected), strict=True)
    )
    print(f"{num_equal} of {len(got)} completions have the same tokens")
    assert num_equal >= 0.97 * len(got)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("max_num_seqs", [3, 48])
def test_turns_that_join_a_session_say_what_one_call_says(
    sampling: Sampling, max_num_seqs: int
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, engine = make_model(), make_engine(make_model(), max_num_seqs=max_num_seqs)
    for _ in range(2):  # the second session replays graphs that the first one has captured
        requests, completions = in_turns(engine, make_requests(30, most=20), sampling, max_num_seqs)
        expected = make_engine(make_model(), enforce_eager=True).generate(requests, sampling)
        assert_nearly_all_equal(completions, expected)
        assert largest_difference(model, requests, completions, sampling) < 1e-3
    assert engine._state is not None and engine._state.graphs is not None
    assert sum(graph is not None for graph in engine._state.graphs._graphs.values()) > 0


def test_calls_and_sessions_of_one_engine_do_not_disturb_each_other() -> None:
    model, engine, requests = make_model(), make_engine(make_model()), make_requests(40)
    before = engine.generate(requests, SAMPLED)
    turns, completions = in_turns(engine, make_requests(30, most=20), SAMPLED, 48)
    assert largest_difference(model, turns, completions, SAMPLED) < 1e-3
    assert_nearly_all_equal(engine.generate(requests, SAMPLED), before)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.trains(name)) for name in TRAININGS]
)
def test_conversations_with_a_tool_are_trained(
    name: str, trained: Callable[[str], Outcome]
) -> None:
    rows = list(trained(name).metrics.values())
    assert len(rows) == NUM_STEPS
    for row in rows:
        assert row["num_turns/mean"] >= 1
        assert row["num_tool_errors/max"] == 0
        assert row["actor/grad_norm"] > 0
    assert max(row["num_tool_calls/max"] for row in rows) >= 1
