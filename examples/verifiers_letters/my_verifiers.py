"""The environment for `rolepool train`: `environment.path=my_verifiers.py
environment.name=rollout`."""

from rolepool.recipes.environments.verifiers_rollout import rollout_of

agent = {"harness": {"id": "my_letters"}, "runtime": {"type": "subprocess"}}
rollout = rollout_of({"taskset": {"id": "my_letters"}, "agent": agent})
