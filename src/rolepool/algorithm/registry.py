"""Advantage estimators and policy losses by name: those of rolepool, and those that users add.

A user adds a function with `register_adv_est("name")` or `register_policy_loss("name")`, or writes `module:function`
into the config. Functions are called with keyword arguments and must accept more than they use (`**kwargs`).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rolepool.config.functions import ADV_ESTIMATORS, POLICY_LOSSES, Known, Needs, check_name, import_object
from rolepool.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


class Registry:
    """The functions that one key of the config can name."""

    def __init__(self, key: str, known: Known) -> None:
        self._key, self._known = key, known
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, needs: Sequence[str] = ()) -> Callable[[Function], Function]:
        """A decorator that gives a function a name. `needs` names the arguments that must not be None."""

        def add(function: Function) -> Function:
            if self._functions.setdefault(name, function) is not function:
                raise ConfigError(f"{self._key}: {name} is registered twice; give one function another name")
            self._known.setdefault(name, tuple(needs))
            return function

        return add

    def find(self, name: str) -> Callable[..., Any]:
        """The function of this name. `module:function` is imported, also from the current folder."""
        if ":" not in name:
            return self._functions[check_name(self._known, name)]
        function: Callable[..., Any] = import_object(self._key, name)
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ConfigError(f"{self._key}={name}: must accept further keyword arguments; add **kwargs to it")
        return function

    def needs_of(self, name: str) -> Needs:
        """What the function of this name was registered to need."""
        function = self.find(name)
        return next((self._known[known] for known, other in self._functions.items() if other is function), ())


adv_estimators = Registry("algorithm.adv_estimator", ADV_ESTIMATORS)
policy_losses = Registry("actor_rollout_ref.actor.policy_loss.loss_mode", POLICY_LOSSES)
register_adv_est = adv_estimators.register
register_policy_loss = policy_losses.register
