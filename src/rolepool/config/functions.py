"""Functions and classes that a key names: which names there are, and importing those that users
write.

A key holds a known name, or `module:name`. A user adds an advantage estimator or a policy loss with
`register_adv_est("name")` or `register_policy_loss("name")`. These functions are called with
keyword arguments and must accept more than they use (`**kwargs`). This module does not import
rolepool's own functions, because they need torch; `rolepool.algorithm` registers them.
"""

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ValidationInfo

from rolepool.errors import ConfigError, one_line

Needs = tuple[str, ...]
"""Arguments that a function must get. `values` need a critic, `reward_baselines` need greedy
responses."""

Known = dict[str, Needs]
"""What the functions that a key can name need, by their names."""
AnyFunction = Callable[..., Any]
"""A function that a key names. Its caller knows its arguments and its result."""
Function = TypeVar("Function", bound=AnyFunction)

_COMPARING = ("grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg")
"""Estimators that compare the responses to one prompt."""
ADV_ESTIMATORS: Known = {
    "gae": ("values",),
    **dict.fromkeys(_COMPARING, ("index",)),
    "remax": ("reward_baselines",),
}
ADV_ESTIMATORS |= {"reinforce_plus_plus": (), "reinforce_plus_plus_baseline": ("index",)}
BUILT_IN_POLICY_LOSSES = ("vanilla", "gspo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo")
"""All of them take weights (`rollout_is_weights`)."""
POLICY_LOSSES: Known = dict.fromkeys(BUILT_IN_POLICY_LOSSES, ())
ENGINES = {
    "native": "rolepool.rollout.native:native_engine",
    "transformers": "rolepool.rollout.transformers_engine:transformers_engine",
    "vllm": "rolepool.rollout.vllm_engine:vllm_engine",
}
"""The functions that make rolepool's own rollout engines."""
ENGINES_WITH_A_PROCESS = ("vllm",)
"""Those of them that start a process beside the rollout's, which takes a while."""
OTHER_ENGINES = ("sglang", "trtllm")
"""Engines that scripts of other trainers name and that rolepool cannot run yet."""

EXTENDABLE = (
    "roles.",
    "placement.roles.",
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
)
"""How keys begin that an extension can add, or whose values it can add."""
EXTENDABLE_NAMES = {EXTENDABLE[2]: ADV_ESTIMATORS, EXTENDABLE[3]: POLICY_LOSSES}
"""The names that are known for those of them that name a function."""
EXTENSIONS: list[str] = []
"""The extensions that this process has imported. Worker processes import the same ones."""

_TRUSTED: ContextVar[frozenset[str] | None] = ContextVar("_TRUSTED", default=None)
"""The only names that may be imported; None allows all, because the config is the user's own."""
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


ANY_NAME = "any_name"
"""In the context of a validation: whether a function may have a name that is not known."""


OWN_WORD = "if you trust it, name it yourself, such as with `rolepool predict RUN --set key=value`"


def check_name(known: Collection[str], name: str, kind: str = "function") -> str:
    """The name, if it is known or has the form `module:name`. `kind` says what the user's own may
    be."""
    if name not in known and not _REFERENCE.fullmatch(name):
        choices = f"one of {', '.join(known)}, or " if known else ""
        raise ValueError(f"must be {choices}a {kind} of your own as module:{kind}")
    return name


def _one_of(known: Collection[str], kind: str = "function") -> AfterValidator:
    """Checks a name when a config is validated."""

    def check(name: str, info: ValidationInfo) -> str:
        if info.context is not None and info.context.get(ANY_NAME):
            return name
        return check_name(known, name, kind)

    return AfterValidator(check)


AdvEstimatorName = Annotated[str, _one_of(ADV_ESTIMATORS)]
PolicyLossName = Annotated[str, _one_of(POLICY_LOSSES)]
StrategyName = Annotated[str, _one_of(("standard", "split", "custom", "auto"))]
EngineName = Annotated[str, _one_of((*ENGINES, *OTHER_ENGINES), kind="class")]
FormatName = Annotated[str, _one_of(("hermes",))]
StepName = Annotated[str, _one_of(())]


@contextmanager
def only_reading(*words: str) -> Iterator[None]:
    """Import nothing within the block, because a run folder can come from anywhere, and so can the
    names in it.

    What the user names with `words` (`key=value`) is imported all the same.
    """
    trusted: set[str] = set()
    for word in words:
        _, _, value = word.partition("=")
        # A list has several names, each perhaps in quotes.
        trusted.update(re.split(r"[\s,\[\]'\"]+", value))
    token = _TRUSTED.set(frozenset(trusted))
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def may_import(name: str) -> bool:
    """Whether the user has named this, and not only a run folder that is read."""
    trusted = _TRUSTED.get()
    return trusted is None or name in trusted


def import_object(key: str, reference: str) -> Any:
    """What `module:name` refers to, for a key of the config. The module may be in the current
    folder."""
    module, _, name = reference.partition(":")
    fix = "write module:name; the module must be installed or in the current folder"
    return _import(f"{key}={reference}", fix, module, name)


class Registry:
    """The functions that one key of the config can name."""

    def __init__(self, key: str, known: Known) -> None:
        self._key = key
        self._known = known
        self._functions: dict[str, AnyFunction] = {}

    def register(self, name: str, needs: Sequence[str] = ()) -> Callable[[Function], Function]:
        """A decorator that gives a function a name. `needs` names the arguments that must not be
        None."""

        def add(function: Function) -> Function:
            if self._functions.setdefault(name, function) is not function:
                raise ConfigError(
                    f"{self._key}: {name} is registered twice; give one function another name"
                )
            self._known.setdefault(name, tuple(needs))
            return function

        return add

    def has(self, name: str) -> bool:
        """Whether a function with this name is registered in this process."""
        return name in self._functions

    def find(self, name: str) -> AnyFunction:
        """The function of this name. `module:function` is imported, also from the current
        folder."""
        if ":" not in name:
            return self._functions[check_name(self._known, name)]
        function: AnyFunction = import_object(self._key, name)
        parameters = inspect.signature(function).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise ConfigError(
                f"{self._key}={name}: must accept further keyword arguments; add **kwargs to it"
            )
        return function

    def needs_of(self, name: str) -> Needs:
        """What the function of this name was registered to need."""
        function = self.find(name)
        # A function that is named as `module:function` may be registered, too.
        for known, other in self._functions.items():
            if other is function:
                return self._known[known]
        return ()


def policy_loss_takes(name: str, argument: str) -> bool:
    """Whether the policy loss of this name has an argument of this name. One that cannot be asked
    here counts as if it had: it belongs to an extension, or to a run folder, that is not
    imported."""
    if name in BUILT_IN_POLICY_LOSSES:
        return True
    if ":" in name:
        is_known = may_import(name)
    else:
        is_known = policy_losses.has(name)
    if not is_known:
        return True
    return argument in inspect.signature(policy_losses.find(name)).parameters


adv_estimators = Registry("algorithm.adv_estimator", ADV_ESTIMATORS)
policy_losses = Registry("actor_rollout_ref.actor.policy_loss.loss_mode", POLICY_LOSSES)
register_adv_est = adv_estimators.register
register_policy_loss = policy_losses.register


def import_environment(path: str | None, name: str | None) -> Any:
    """The environment that the keys name: a class with the method `reset`, or an async function.
    None if they name none."""
    if name is None:
        return None
    if path is None:
        found = import_object("environment.name", name)
    else:
        fix = "environment.path is a Python file, and environment.name a class or function in it"
        found = getattr(_import_file(f"environment.path={path}", fix, path), name, None)
    is_class = inspect.isclass(found) and hasattr(found, "reset")
    if not is_class and not inspect.iscoroutinefunction(found):
        wanted = "an async function rollout(row, generate), or a class with the method reset"
        where = "" if path is None else f" in {path}"
        raise ConfigError(
            f"environment.name={name}: there is no such environment{where}; it must name {wanted}"
        )
    return found


def import_extensions(extensions: Iterable[str]) -> None:
    """Import the modules of `trainer.extensions`: names of modules, or paths of .py files."""
    fix = "name an installed module, a module in the current folder, or a .py file"
    for extension in extensions:
        load = _import_file if extension.endswith(".py") else _import
        load(f"trainer.extensions={extension}", fix, extension)
        if extension not in EXTENSIONS:
            EXTENSIONS.append(extension)


def _import_file(setting: str, fix: str, path: str) -> Any:
    """The module of a Python file."""
    file = Path(path).expanduser().resolve()
    module = _import(setting, fix, file.stem, folder=file.parent)
    if module.__file__ != str(file):
        raise ConfigError(
            f"{setting}: {module.__file__} has the same module name; rename your file"
        )
    return module


def _import(
    setting: str, fix: str, module: str, name: str | None = None, *, folder: Path | None = None
) -> Any:
    """The module, or what has this name in it. Also looks in the current folder, and in
    `folder`."""
    if not may_import(setting.partition("=")[2]):
        raise ConfigError(
            f"{setting}: is not imported, because only the run folder names it; {OWN_WORD}"
        )
    for place in (folder, Path.cwd()):
        if place is not None and str(place) not in sys.path:
            sys.path.append(str(place))
    try:
        imported = import_module(module)
        return imported if name is None else getattr(imported, name)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"{setting}: cannot be imported ({reason}); {fix}") from None
