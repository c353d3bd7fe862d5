"""Which calls change the models of a role: a role that no call has changed since a state was saved
need not load that state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rolepool.cluster import WorkerGroup
from rolepool.cluster.pending import PendingCall
from rolepool.config.functions import import_object
from rolepool.placement.roles import ROLE_SPECS, Role
from rolepool.protocol.worker import registered_methods
from rolepool.trainer.deployment import Held, methods_that_keep_models


def role_of(group: WorkerGroup) -> Any:
    return SimpleNamespace(group=group)


@pytest.mark.parametrize(
    ("role", "changing"),
    [
        (Role.Actor, {"update_actor", "load_checkpoint"}),
        (Role.Critic, {"update_critic", "load_checkpoint"}),
    ],
)
def test_of_the_methods_of_a_trained_role_only_updates_and_loads_change_its_models(
    role: Role, changing: set[str]
) -> None:
    methods = set(registered_methods(import_object("worker", ROLE_SPECS[role].worker)))
    assert methods - methods_that_keep_models(role) == changing


@pytest.mark.parametrize("method", ["update_actor", "load_checkpoint", "a_method_of_the_user"])
def test_a_role_does_not_hold_a_state_any_more_after_a_call_that_may_change_its_models(
    method: str,
) -> None:
    group = WorkerGroup("pool", [], {})
    held = Held.now(3, "actor", role_of(group))
    for other_role, harmless in [
        ("actor", "compute_log_prob"),
        ("actor", "export_rows"),
        ("actor", "take_snapshot"),
        ("critic", "update_critic"),
    ]:
        PendingCall(group, other_role, harmless)
    assert Held.now(3, "actor", role_of(group)) == held
    assert Held.now(2, "actor", role_of(group)) != held
    PendingCall(group, "actor", method)
    assert Held.now(3, "actor", role_of(group)) != held


def test_new_processes_hold_no_state_of_those_before_them() -> None:
    before, after = (WorkerGroup("pool", [], {}) for _ in range(2))
    assert Held.now(3, "actor", role_of(before)) != Held.now(3, "actor", role_of(after))
