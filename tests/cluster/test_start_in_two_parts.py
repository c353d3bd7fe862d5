"""A start in two parts: the driver begins it, does other work, and a cluster finishes it."""

from __future__ import annotations

import os
import sys

import psutil
import pytest
import ray
from cluster_helpers import all_ended, leaked_since, plan_of, shared_memory, wait_until

from rolepool.cluster import Cluster
from rolepool.cluster.begin import begin
from rolepool.protocol import Dispatch, Worker, register

UNUSED = "xml.dom.minidom"
"""A module that nothing else imports in a worker process."""


class Importer(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def has(self, module: str) -> bool:
        return module in sys.modules


def test_a_cluster_finishes_a_start_whose_processes_have_imported_what_they_were_told() -> None:
    plan = plan_of({"first": [1], "second": [1]})
    with begin(
        plan, helpers={"helpers": 1}, modules={"first": [UNUSED, "no_such_module"]}
    ) as begun:
        with Cluster(plan, begun=begun) as cluster:
            assert list(cluster.groups) == ["first", "second", "helpers"]
            answers = {}
            for name, group in cluster.groups.items():
                group.add_role("importer", Importer)
                (answers[name],) = group.role("importer").has(UNUSED)
            assert answers == {"first": True, "second": False, "helpers": False}
        assert not ray.is_initialized(), "the cluster has taken over the end of Ray"


def test_threads_of_workers_wait_passively_whatever_the_driver_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with Cluster(plan_of({"only": [1]})) as cluster:
        assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
        group = cluster.groups["only"]
        group.add_role("importer", Importer)
        assert group.role("importer").variable("OMP_WAIT_POLICY") == ["PASSIVE"]


def test_a_start_that_nobody_finishes_leaves_nothing_behind() -> None:
    before = shared_memory()
    with pytest.raises(ValueError, match="the data is bad"), begin(plan_of({"only": [2]})):
        (answer,) = ray.wait([ray.put(1)])[0]
        assert ray.get(answer) == 1
        started = [child.pid for child in psutil.Process().children(recursive=True)]
        raise ValueError("the data is bad")
    assert not ray.is_initialized()
    assert started
    wait_until(lambda: all_ended(started), timeout_s=60)
    assert not leaked_since(before)
