"""Built-in reward rules, and which rule scores which data source.

Owns how an answer is found in a response and compared with the ground truth. Imports no torch, so
that a ground truth that a rule cannot read is reported before training starts.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rolepool.config import Config
from rolepool.config.base import Items, Section, read_table
from rolepool.errors import DataError

Score = float | dict[str, float | str]
"""A score, or a dict with `score`, other numbers to log, and perhaps `pred`, the answer as text."""
Rule = Callable[..., Score]
"""Takes the response and the ground truth; rules in `RULES_WITH_EXTRA` also take `extra_info`."""

_TAIL_CHARACTERS = 300
"""Rules for a marked answer search only the end of a response, as verl does."""


class Tables(Section):
    """The content of `rules.yaml`."""

    datasets: dict[str, str]
    """Names of rules by data source."""
    same_meaning: Items[Items[str]]
    """Pairs of a pattern and its replacement in an answer."""


_TABLES = read_table(Path(__file__).with_suffix(".yaml"), Tables)


def exact_match(solution_str: str, ground_truth: object) -> float:
    """1 if the response is the ground truth, or is in the list of ground truths; surrounding white
    space is ignored."""
    if isinstance(ground_truth, list | tuple):
        accepted = ground_truth
    else:
        accepted = [ground_truth]
    return float(solution_str.strip() in [str(answer).strip() for answer in accepted])


def position_match(solution_str: str, ground_truth: object) -> float:
    """The fraction of words that are correct and in the correct place; missing and extra words
    count as wrong."""
    words = solution_str.split()
    wanted = str(ground_truth).split()
    num_right = sum(word == right for word, right in zip(words, wanted, strict=False))
    return num_right / max(len(words), len(wanted), 1)


# The number after ####

_STRICT_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE_ANSWER = re.compile(r"####\s*([-+]?[$€£¥]?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")


def gsm8k(solution_str: str, ground_truth: object) -> float:
    """1 if the text after the last `#### ` is the ground truth, as in verl: `72.` is not `72`;
    commas are removed.

    The ground truth may also be a solution that ends with `#### 72`, as in the original dataset.
    """
    wanted = strict_answer(str(ground_truth)) or str(ground_truth)
    if not re.fullmatch(r"-?[0-9.]+", wanted):
        raise DataError(
            f"the ground truth is {ground_truth!r}; the rule gsm8k needs a number without commas"
        )
    return float(strict_answer(solution_str[-_TAIL_CHARACTERS:]) == wanted)


def strict_answer(text: str) -> str | None:
    """What follows the last `#### ` (with one space) and looks like a number; None if nothing
    does."""
    answers: list[str] = _STRICT_ANSWER.findall(text)
    return answers[-1].replace(",", "") if answers else None


def gsm8k_flexible(solution_str: str, ground_truth: object) -> float:
    """1 if the last number after `####` has the same value as the ground truth; currency signs are
    ignored."""
    truth = str(ground_truth)
    wanted = _as_decimal(strict_answer(truth) or truth)
    if wanted is None:
        raise DataError(
            f"the ground truth is {ground_truth!r}; the rule gsm8k_flexible needs a number"
        )
    tail = solution_str[-_TAIL_CHARACTERS:]
    answers = _FLEXIBLE_ANSWER.findall(tail)
    if not answers:
        return 0.0
    return float(_as_decimal(answers[-1]) == wanted)


def _as_decimal(text: str) -> Decimal | None:
    plain_text = re.sub(r"[\s,$€£¥]", "", text)
    try:
        number = Decimal(plain_text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


# Answers in LaTeX

_THOUSANDS = re.compile(r"-?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?")


def normalize_latex(answer: str) -> str:
    """One spelling for answers that mean the same: `\\dfrac 12`, `1/2` and `$\\frac{1}{2}$`; `5
    cm.` and `5`."""
    for pattern, replacement in _TABLES.same_meaning:
        answer = re.sub(pattern, replacement, answer)
    if _THOUSANDS.fullmatch(answer):
        return re.sub(r"[{},]", "", answer)
    return answer


def boxed_answer(text: str) -> str | None:
    """The content of the last `\\boxed{...}`; None if there is none, or if it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None


def math_boxed(solution_str: str, ground_truth: object) -> float:
    """1 if the last boxed answer means the same as the ground truth; uses the package math-verify
    if it is installed.

    The ground truth may also be a solution that contains a boxed answer.
    """
    wanted = _expected(ground_truth, "math")
    answer = boxed_answer(solution_str)
    if answer is None:
        return 0.0
    plain_answer = normalize_latex(answer)
    plain_truth = normalize_latex(wanted)
    if plain_answer == plain_truth:
        return 1.0
    with suppress(InvalidOperation):
        return float(Decimal(plain_answer) == Decimal(plain_truth))
    return float(_verified(answer, wanted))


def math_dapo(solution_str: str, ground_truth: object) -> dict[str, float | str]:
    """1 or -1, as DAPO scores AIME: the text after the last `Answer:` is compared; it may be boxed.
    `acc` is 1 or 0, and `pred` is the answer."""
    wanted = _expected(ground_truth, "math_dapo")
    tail = solution_str[-_TAIL_CHARACTERS:]
    marked = re.findall(r"answer\s*:\s*([^\n]+)", tail, re.IGNORECASE)
    answer = ""
    if marked:
        last = marked[-1]
        answer = boxed_answer(last) or last
    answer = normalize_latex(answer)
    is_right = answer == normalize_latex(wanted)
    return {
        "score": 1.0 if is_right else -1.0,
        "acc": float(is_right),
        "pred": answer,
    }


def _expected(ground_truth: object, rule: str) -> str:
    text = boxed_answer(str(ground_truth)) or str(ground_truth)
    if isinstance(ground_truth, list | dict) or not normalize_latex(text):
        raise DataError(
            f"the ground truth is {ground_truth!r}; the rule {rule} needs text or a number"
        )
    return text


_HAS_MATH_VERIFY = find_spec("math_verify") is not None
_EXPENSIVE = re.compile(r"\^\{[^{}]*\^|\^\{?-?\d{3,}|\d{30,}|!|\\binom|.{200,}", re.DOTALL)
"""Towers of powers, long numbers, factorials: math-verify would compute them, and its time limit
needs the main thread, in which worker processes do not run."""


def _verified(answer: str, wanted: str) -> bool:
    """Whether math-verify is installed and finds that both answers are equal. It is not asked if
    that might take long."""
    if not _HAS_MATH_VERIFY or _EXPENSIVE.search(answer):
        return False
    package = import_module("math_verify")  # not before it is needed, because it is slow
    parsed_truth = package.parse(f"${wanted}$", parsing_timeout=None)
    parsed_answer = package.parse(f"${answer}$", parsing_timeout=None)
    return bool(package.verify(parsed_truth, parsed_answer, timeout_seconds=None))


# Answers of chat models

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?[$€£¥]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+"
)
_FORMAT_TAG = re.compile(r"</?(?:think|answer)>")


def last_number(solution_str: str, ground_truth: object) -> dict[str, float | str]:
    """1 if the last number in the response has the value of the ground truth. `pred` is the number.

    The ground truth may also be a solution that ends with `#### 72`.
    """
    wanted = _as_decimal(strict_answer(str(ground_truth)) or str(ground_truth))
    if wanted is None:
        raise DataError(
            f"the ground truth is {ground_truth!r}; the rule last_number needs a number"
        )
    answer = last_number_in(solution_str)
    return _graded(answer, _as_decimal(answer) == wanted)


def last_number_in(text: str) -> str:
    """The last number in a text; nothing if there is none."""
    plain_text = text.replace("{,}", ",").replace("\N{MINUS SIGN}", "-")
    numbers: list[str] = _NUMBER.findall(plain_text)
    return numbers[-1] if numbers else ""


def last_box(solution_str: str, ground_truth: object) -> dict[str, float | str]:
    """1 if the last boxed answer is the ground truth, as a text or as a number. `pred` is the
    answer.

    The ground truth may also be a solution with a boxed answer or with `#### 72`, or a list of
    accepted answers.
    """
    accepted = _accepted(ground_truth, "boxed")
    answer = boxed_answer(solution_str) or ""
    return _graded(answer, any(_is_same(answer, wanted) for wanted in accepted))


def answer_tag(solution_str: str, ground_truth: object) -> dict[str, float | str]:
    """The same for the text between the last `<answer>` and `</answer>`, which may be boxed."""
    accepted = _accepted(ground_truth, "answer_tag")
    text = tagged_answer(solution_str) or ""
    answer = boxed_answer(text) or text
    return _graded(answer, any(_is_same(answer, wanted) for wanted in accepted))


def tagged_answer(text: str) -> str | None:
    """What is between the last `<answer>` and `</answer>`; None if a tag is missing."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return text[start + len("<answer>") : end]
    return None


def think_format(solution_str: str, ground_truth: object = None) -> float:
    """1 if the response is `<think>...</think>` and then `<answer>...</answer>` with some text,
    each once, and nothing else. The first tag may be missing, because some chat templates write it
    before the response."""
    text = solution_str.strip().removeprefix("<think>")
    thoughts, end_of_thoughts, rest = text.partition("</think>")
    tagged = rest.strip()
    is_tagged = tagged.startswith("<answer>") and tagged.endswith("</answer>")
    if not end_of_thoughts or not is_tagged:
        return 0.0
    answer = tagged.removeprefix("<answer>").removesuffix("</answer>")
    has_text = bool(answer.strip())
    has_other_tags = _FORMAT_TAG.search(thoughts + answer) is not None
    return float(has_text and not has_other_tags)


def _graded(answer: str, is_right: bool) -> dict[str, float | str]:
    return {"score": float(is_right), "pred": answer.strip()}


def _accepted(ground_truth: object, rule: str) -> list[str]:
    """The accepted answers. Raises DataError if there is none."""
    if isinstance(ground_truth, list | tuple):
        truths = ground_truth
    else:
        truths = [ground_truth]
    texts: list[str] = []
    for truth in truths:
        text = str(truth)
        text = boxed_answer(text) or strict_answer(text) or text
        if isinstance(truth, dict) or not text.strip():
            break
        texts.append(text)
    if not texts or len(texts) < len(truths):
        raise DataError(
            f"the ground truth is {ground_truth!r}; the rule {rule} needs text or a number"
        )
    return texts


def _is_same(answer: str, wanted: str) -> bool:
    """Whether two answers are equal as numbers or as texts. Case, white space and spellings in
    LaTeX do not matter."""
    number = _as_decimal(answer)
    if number is not None and number == _as_decimal(wanted):
        return True
    if answer.casefold().split() == wanted.casefold().split():
        return True
    return bool(answer.strip()) and normalize_latex(answer) == normalize_latex(wanted)


def reasoning_gym(
    solution_str: str, ground_truth: object, extra_info: dict[str, object] | None = None
) -> dict[str, float | str]:
    """The score that the verifier of a task of reasoning-gym gives to the answer, from 0 to 1.
    `pred` is the answer.

    Verifiers expect the answer alone: what is between the last `<answer>` tags, or else the last
    number if the ground truth is a number, or else the whole response.
    """
    # Not before it is needed, because the package is slow.
    from rolepool.data.reasoning_gym import ENTRY, verify

    entry = (extra_info or {}).get(ENTRY)
    if not isinstance(entry, dict):
        raise DataError("the rule reasoning_gym needs rows of reasoning_gym:TASK; use another rule")
    truth = str(ground_truth).strip()
    answer = tagged_answer(solution_str)
    if answer is None:
        if last_number_in(truth) == truth:
            answer = last_number_in(solution_str)
        else:
            answer = solution_str
    return {"score": verify(answer.strip(), entry), "pred": answer.strip()}


# Which rule scores a row

RULES: dict[str, Rule] = {
    "exact_match": exact_match,
    "position_match": position_match,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "math": math_boxed,
    "math_dapo": math_dapo,
    "last_number": last_number,
    "boxed": last_box,
    "answer_tag": answer_tag,
    "format": think_format,
    "reasoning_gym": reasoning_gym,
}
RULES_WITH_EXTRA = (reasoning_gym,)
"""The rules that need more than the ground truth."""
RULES_WITHOUT_TRUTH = ("format",)
"""The rules that look only at the response."""


def rule_for(data_source: str) -> Rule:
    """The rule for a data source. `exact_match/my_set` uses `exact_match`; its scores are reported
    separately."""
    parts = data_source.split("/")
    name = _TABLES.datasets.get(data_source, parts[0])
    if name in RULES:
        return RULES[name]
    if parts[-1].lower().startswith("aime"):
        return math_dapo
    fix = f"set reward.functions to a rule ({', '.join(RULES)}) or to your own FILE.py:FUNCTION"
    raise DataError(f"there is no built-in reward for data_source {data_source!r}; {fix}")


def call_rule(
    rule: Rule,
    solution_str: str,
    ground_truth: object,
    extra_info: dict[str, object] | None,
) -> Score:
    """The score of a response. Raises DataError if the rule cannot use the row."""
    if rule in RULES_WITH_EXTRA:
        return rule(solution_str, ground_truth, extra_info)
    return rule(solution_str, ground_truth)


def rules_for(config: Config, data_source: str) -> dict[str, Rule]:
    """The rules that score rows of this data source, by name; none if only a model, an environment
    or the user's code does."""
    if config.reward_model.enable:
        return {}
    if config.custom_reward_function.path is not None or config.environment.name:
        return {}
    entries = config.reward.functions
    if entries:
        names = [entry.function for entry in entries]
        return {name: RULES[name] for name in names if name in RULES}
    chosen = rule_for(data_source)
    return {name: rule for name, rule in RULES.items() if rule is chosen}
