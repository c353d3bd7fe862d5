"""How `algorithm.rollout_correction` is written: presets, thresholds, and rules that reject tokens.

Owns the names and the texts of thresholds, which are those of verl. `rolepool.algorithm` computes
with what is read here.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Rule = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
"""What a rule compares: a number of each token, or its sum, mean or largest value in a sequence."""
RULES: tuple[Rule, ...] = Rule.__args__  # type: ignore[attr-defined]

Preset = Literal[
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis",
    "bypass_pg_geo_rs_token_tis",
    "disabled",
]

_TOKEN_IS: dict[str, object] = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQUENCE_IS: dict[str, object] = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP: dict[str, object] = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_GEO_RS: dict[str, object] = {
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": "0.999_1.001",
}
_K3_RS: dict[str, object] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_SEQUENCE_RS: dict[str, object] = {
    "rollout_rs": "seq_sum_k1",
    "rollout_rs_threshold": "0.5_2.0",
}
_PPO_CLIP: dict[str, object] = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE: dict[str, object] = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: Mapping[str, Mapping[str, object]] = {
    "decoupled_token_is": _TOKEN_IS,
    "decoupled_seq_is": _SEQUENCE_IS,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": _SEQUENCE_IS | _SEQUENCE_RS,
    "decoupled_geo_rs": _GEO_RS,
    "decoupled_geo_rs_seq_tis": _GEO_RS | _SEQUENCE_IS,
    "decoupled_geo_rs_token_tis": _GEO_RS | _TOKEN_IS,
    "decoupled_k3_rs": _K3_RS,
    "decoupled_k3_rs_seq_tis": _K3_RS | _SEQUENCE_IS,
    "decoupled_k3_rs_token_tis": _K3_RS | _TOKEN_IS,
    "bypass_ppo_clip": _PPO_CLIP,
    "bypass_ppo_clip_geo_rs": _PPO_CLIP | _GEO_RS,
    "bypass_ppo_clip_k3_rs": _PPO_CLIP | _K3_RS,
    "bypass_pg_is": _REINFORCE | _SEQUENCE_IS,
    "bypass_pg_token_icepop": _REINFORCE | _ICEPOP,
    "bypass_pg_geo_rs": _REINFORCE | _GEO_RS,
    "bypass_pg_geo_rs_seq_tis": _REINFORCE | _GEO_RS | _SEQUENCE_IS,
    "bypass_pg_geo_rs_token_tis": _REINFORCE | _GEO_RS | _TOKEN_IS,
    "disabled": {},
}
"""The keys that each preset sets. The others keep their defaults."""


class Bounds(NamedTuple):
    """What a number may be. `lower` is None if there is only an upper bound."""

    lower: float | None
    upper: float


def as_number(value: object) -> object:
    """A threshold that is one number, as a number; any other value as it is. An underscore
    separates two bounds, and is not a part of a number as in Python."""
    if isinstance(value, str) and "_" not in value:
        try:
            return float(value)
        except ValueError:
            return value
    return value


def read_bounds(threshold: float | str) -> Bounds:
    """The bounds of a threshold: `2.0` is an upper bound, and `0.5_2.0` both. Raises ValueError."""
    words = str(threshold).split("_")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError("must be a number, or two numbers such as 0.5_2.0")
    if not all(0 < number < float("inf") for number in numbers):
        raise ValueError("must be greater than 0 and finite, because it bounds a ratio or a KL")
    upper = numbers[-1]
    if len(numbers) == 1:
        return Bounds(None, upper)
    lower = numbers[0]
    if lower >= upper:
        raise ValueError(f"the lower bound must be below the upper one; write {upper}_{lower}")
    return Bounds(lower, upper)


def read_rules(names: str) -> list[Rule]:
    """The rules of a list with commas, each once. Raises ValueError."""
    rules: list[Rule] = []
    for word in names.split(","):
        name = word.strip()
        known = [rule for rule in RULES if rule == name]
        if not known:
            raise ValueError(f"must be one of {', '.join(RULES)}, or several with commas")
        if known[0] not in rules:
            rules.append(known[0])
    return rules


def read_rules_with_bounds(names: str, threshold: float | str) -> dict[Rule, Bounds]:
    """The bounds of each rule. There is one threshold for all rules, or one for each of them, with
    commas. Raises ValueError.

    The bounds of k1 are those of a ratio. If there is only the upper one, its inverse is the lower
    one.
    """
    rules = read_rules(names)
    words = str(threshold).split(",")
    if len(words) == 1:
        words = words * len(rules)
    if len(words) != len(rules):
        raise ValueError(
            f"there are {len(rules)} rules in rollout_rs={names}; give one threshold for all, or "
            f"{len(rules)} with commas"
        )
    bounds_of: dict[Rule, Bounds] = {}
    for rule, word in zip(rules, words, strict=True):
        bounds = read_bounds(word.strip())
        if rule.endswith("k1"):
            bounds_of[rule] = _bounds_of_ratio(rule, bounds)
        elif bounds.lower is not None:
            raise ValueError(f"{rule} has only an upper bound; write {bounds.upper}")
        else:
            bounds_of[rule] = bounds
    return bounds_of


def _bounds_of_ratio(rule: str, bounds: Bounds) -> Bounds:
    if bounds.lower is not None:
        return bounds
    if bounds.upper <= 1:
        raise ValueError(f"{rule} needs an upper bound above 1, or two bounds such as 0.5_2.0")
    return Bounds(1 / bounds.upper, bounds.upper)
