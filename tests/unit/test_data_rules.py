"""Rules score as users of verl expect: a table of responses for each of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rolepool.data.rules import (
    RULES,
    answer_tag,
    exact_match,
    gsm8k,
    gsm8k_flexible,
    last_box,
    last_number,
    math_boxed,
    math_dapo,
    position_match,
    rule_for,
)
from rolepool.errors import DataError

# Words


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("Paris", "Paris", 1),
        (" Paris\n", "Paris", 1),
        ("paris", "Paris", 0),
        ("Paris, France", "Paris", 0),
        ("42", 42, 1),
        ("b", ["a", "b"], 1),
        ("c", ["a", "b"], 0),
        ("", "Paris", 0),
    ],
)
def test_exact_match_compares_all_but_the_white_space_around(
    response: str, truth: Any, score: float
) -> None:
    assert exact_match(response, truth) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("b c d e", 1),
        ("b c d a", 0.75),
        ("c b d e", 0.5),
        ("b c", 0.5),
        ("", 0),
        ("b c d e f g h a", 0.5),
        ("x b c d", 0),
    ],
)
def test_position_match_is_the_fraction_of_words_in_their_place(
    response: str, score: float
) -> None:
    assert position_match(response, "b c d e") == score


# gsm8k: response, ground truth, strict score, flexible score

GSM8K = [
    ("so 70 + 2 = 72.\n#### 72", "72", 1, 1),
    ("#### 72\n", "72", 1, 1),
    ("#### 72 apples", "72", 1, 1),
    ("#### 72 or 73", "72", 1, 1),
    ("#### 72.", "72", 0, 1),
    ("#### 72.0", "72", 0, 1),
    ("#### 72.0", "72.0", 1, 1),
    ("#### 72.5", "72.5", 1, 1),
    ("####72", "72", 0, 1),
    ("####  72", "72", 0, 1),
    ("####\n72", "72", 0, 1),
    ("####\t72", "72", 0, 1),
    ("### 72", "72", 0, 0),
    ("##### 72", "72", 1, 1),
    ("#### $72", "72", 0, 1),
    ("#### €72", "72", 0, 1),
    ("#### 72$", "72", 1, 1),
    ("#### 72%", "72", 1, 1),
    ("#### +5", "5", 0, 1),
    ("#### -5", "-5", 1, 1),
    ("#### - 5", "-5", 0, 0),
    ("#### -$5", "-5", 0, 1),
    ("#### --5", "5", 0, 0),
    ("#### 1,072", "1072", 1, 1),
    ("#### 1,0,72", "1072", 1, 1),
    ("#### 1,072,", "1072", 1, 1),
    ("#### 72,", "72", 1, 1),
    ("#### 0072", "72", 0, 1),
    ("#### .5", "0.5", 0, 1),
    ("#### .5", ".5", 1, 1),
    ("#### 7.2.", "7.2", 0, 1),
    ("#### **72**", "72", 0, 0),
    ("#### (72)", "72", 0, 0),
    ("#### \\boxed{72}", "72", 0, 0),
    ("#### seventy-two", "72", 0, 0),
    ("#### ,", "72", 0, 0),
    ("#### ", "72", 0, 0),
    ("72", "72", 0, 0),
    ("The answer is 72.", "72", 0, 0),
    ("", "72", 0, 0),
    ("#### 71\nno, wait\n#### 72", "72", 1, 1),
    ("#### 72\nno, wait\n#### 71", "72", 0, 0),
    ("#### 72\n#### unsure", "72", 1, 1),
    ("#### 72 " + "x" * 292, "72", 1, 1),
    ("#### 72 " + "x" * 293, "72", 0, 0),
    ("#### 72", 72, 1, 1),
    ("#### 72", "so 70 + 2 = 72.\n#### 72", 1, 1),
    ("#### 1072", "#### 1,072", 1, 1),
]


@pytest.mark.parametrize(("response", "truth", "strict", "flexible"), GSM8K)
def test_gsm8k_compares_texts_and_the_flexible_rule_compares_numbers(
    response: str, truth: Any, strict: float, flexible: float
) -> None:
    assert (gsm8k(response, truth), gsm8k_flexible(response, truth)) == (strict, flexible)


@pytest.mark.parametrize("truth", ["seven", "nan", "1,072", "$72", "+5", " 72", "", None, [72]])
def test_a_ground_truth_that_no_response_can_give_is_an_error(truth: Any) -> None:
    with pytest.raises(DataError, match="the rule gsm8k needs a number without commas"):
        gsm8k("#### 72", truth)


def test_the_flexible_rule_needs_a_number_too() -> None:
    assert gsm8k_flexible("#### 1072", "1,072") == 1
    with pytest.raises(DataError, match="the rule gsm8k_flexible needs a number"):
        gsm8k_flexible("#### 72", "seventy-two")


# math: boxed answer, ground truth, score


MATH = [
    ("5", "5", 1),
    ("5", "6", 0),
    (" 5 ", "5", 1),
    ("$5$", "5", 1),
    ("5.", "5", 1),
    ("5.0", "5", 1),
    ("0.50", ".5", 1),
    ("-.5", "-0.5", 1),
    ("1,234,567", "1234567", 1),
    ("1{,}234", "1234", 1),
    ("1,\\!234", "1234", 1),
    ("1,234", "(1,234)", 0),
    ("(1,234)", "1234", 0),
    ("1,2", "12", 0),
    ("50\\%", "50", 1),
    ("\\$5", "5", 1),
    ("90^\\circ", "90", 1),
    ("90^{\\circ}", "90", 1),
    ("5 \\text{ cm}", "5", 1),
    ("5\\mathrm{cm}^2", "5", 1),
    ("5 cm", "5", 1),
    ("5 degrees", "5", 1),
    ("2m", "2", 0),
    ("2ab", "2ab", 1),
    ("2ab", "2", 0),
    ("\\dfrac{1}{2}", "\\frac{1}{2}", 1),
    ("\\tfrac12", "\\frac{1}{2}", 1),
    ("\\frac1{2}", "\\frac{1}2", 1),
    ("1/2", "\\frac{1}{2}", 1),
    ("-1/2", "\\frac{-1}{2}", 1),
    ("1/2", "2/1", 0),
    ("\\sqrt2", "\\sqrt{2}", 1),
    ("3\\sqrt 2", "3\\sqrt{2}", 1),
    ("\\left( 1, 2 \\right)", "(1,2)", 1),
    ("\\leftarrow", "arrow", 0),
    ("x = 5", "5", 1),
    ("x \\in [1, 2]", "[1,2]", 1),
    ("x \\ne 5", "5", 0),
    ("\\text{Evelyn}", "Evelyn", 1),
    ("\\text{(A)}", "\\textbf{(A)}", 1),
    ("\\text{evelyn}", "Evelyn", 0),
    ("{5}", "5", 1),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", 1),
    ("", "5", 0),
    ("\\frac", "5", 0),
    ("\\text{", "5", 0),
]


EQUAL = [
    ("x+1", "1+x"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("\\frac{2}{4}", "\\frac{1}{2}"),
    ("0.5", "\\frac{1}{2}"),
]
WITHOUT_MATH_VERIFY = """
import json, sys
sys.modules["math_verify"] = None  # now Python finds no such package
from rolepool.data.rules import math_boxed
print(json.dumps([math_boxed(response, truth) for response, truth in json.load(sys.stdin)]))
"""


def in_a_box(answer: str) -> str:
    return f"So the answer is $\\boxed{{{answer}}}$."


@pytest.fixture(scope="module")
def scores_without_math_verify() -> dict[tuple[str, str], float]:
    """The scores of all answers and ground truths, in a process that cannot import the package."""
    pairs = [*[(answer, truth) for answer, truth, _ in MATH], *EQUAL]
    rows = [(in_a_box(answer), truth) for answer, truth in pairs]
    command = [sys.executable, "-c", WITHOUT_MATH_VERIFY]
    ended = subprocess.run(
        command, input=json.dumps(rows), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip(pairs, json.loads(ended.stdout), strict=True))


@pytest.mark.parametrize(("answer", "truth", "score"), MATH)
def test_math_compares_what_latex_means(
    answer: str,
    truth: str,
    score: float,
    scores_without_math_verify: dict[tuple[str, str], float],
) -> None:
    assert scores_without_math_verify[answer, truth] == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("\\boxed{\\frac{1}{2}}", 1),
        ("\\boxed{3}, no: \\boxed{1/2}", 1),
        ("\\boxed{1/2}, no: \\boxed{3}", 0),
        ("\\boxed{\\boxed{1/2}}", 1),
        ("\\boxed{1/2} and \\boxed{1/", 0),
        ("1/2", 0),
        ("\\boxed 1/2", 0),
        ("\\boxed{1/2}" + " and so on" * 100, 1),
        ("", 0),
    ],
)
def test_math_reads_the_last_box(response: str, score: float) -> None:
    assert math_boxed(response, "\\frac{1}{2}") == score


def test_the_ground_truth_may_be_a_solution_with_a_box() -> None:
    assert math_boxed("\\boxed{5}", "We add: $\\boxed{5}$.") == 1
    assert math_dapo("Answer: 5", "We add: $\\boxed{5}$.")["score"] == 1
    assert math_boxed("\\boxed{5}", 5) == 1


@pytest.mark.parametrize("rule", ["math", "math_dapo"])
@pytest.mark.parametrize("truth", ["", " ", [5], {"a": 5}])
def test_a_ground_truth_must_be_something(rule: str, truth: Any) -> None:
    with pytest.raises(DataError, match=f"the rule {rule} needs text or a number"):
        RULES[rule]("\\boxed{5}", truth)


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_without_math_verify_only_spellings_are_compared(
    answer: str, truth: str, scores_without_math_verify: dict[tuple[str, str], float]
) -> None:
    assert scores_without_math_verify[answer, truth] == 0


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_math_verify_finds_equal_values(answer: str, truth: str) -> None:
    pytest.importorskip("math_verify")
    assert math_boxed(f"\\boxed{{{answer}}}", truth) == 1
    assert math_boxed(f"\\boxed{{{answer}}}", "x^2+7") == 0


@pytest.mark.parametrize(
    "answer", ["10^{10^{10}}", "9^{99999}", "2^9999", "5000!", "1" * 40, "x+" * 200 + "1"]
)
def test_an_answer_that_takes_too_long_to_compute_is_wrong(answer: str) -> None:
    start_s = time.monotonic()
    assert math_boxed(f"\\boxed{{{answer}}}", "x+5") == 0
    assert time.monotonic() - start_s < 1


def test_math_verify_works_in_a_thread_as_in_a_worker_process() -> None:
    pytest.importorskip("math_verify")
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(math_boxed, "\\boxed{x+1}", "1+x").result() == 1


# math_dapo


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("So it is 34.\n\nAnswer: 34", 1),
        ("Answer: 34.", 1),
        ("answer : 34", 1),
        ("Answer: $34$", 1),
        ("Answer: \\boxed{34}", 1),
        ("Answer: $\\boxed{34}$", 1),
        ("Answer: x = 34", 1),
        ("Answer: 34\n", 1),
        ("Answer:\n34", 1),
        ("The final answer: 34", 1),
        ("Answer: 33\nNo.\nAnswer: 34", 1),
        ("Answer: 34\nNo.\nAnswer: 33", -1),
        ("Answer: 34 or 35", -1),
        ("Answer: ", -1),
        ("34", -1),
        ("\\boxed{34}", -1),
        ("", -1),
        ("Answer: 34 " + "\n" * 289, 1),
        ("Answer: 34 " + "\n" * 296, -1),
    ],
)
def test_math_dapo_gives_one_or_minus_one(response: str, score: float) -> None:
    found = math_dapo(response, "34")
    assert (found["score"], found["acc"]) == (score, float(score == 1))
    assert (found["pred"] == "34") == (score == 1)


# Answers of chat models


def score(found: Any) -> float:
    return found["score"] if isinstance(found, dict) else found


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("72", "72", 1),
        ("First 5, then 67, so the answer is 72.", "72", 1),
        ("The answer is **72**!", "72", 1),
        ("So \\boxed{72}.", "72", 1),
        ("It costs $1,072.50 in total.", "1072.5", 1),
        ("1{,}072", "1,072", 1),
        ("72.0", 72, 1),
        ("-5", "-5", 1),
        ("\N{MINUS SIGN}5", "-5", 1),
        ("$-5$", "-5", 1),
        ("10-5", "5", 1),
        ("x2", "2", 0),
        ("0.5", ".5", 1),
        (".5", "0.5", 1),
        ("1, 2", "2", 1),
        ("12,34", "34", 1),
        ("50%", "50", 1),
        ("72 and no other number than 3", "72", 0),
        ("seventy-two", "72", 0),
        ("", "72", 0),
        ("So 70 + 2 = 72", "We add: 70 + 2.\n#### 72", 1),
    ],
)
def test_last_number_compares_the_value_of_the_last_number(
    response: str, truth: Any, expected: float
) -> None:
    assert score(last_number(response, truth)) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("72", "72", 1),
        ("72.0", 72, 1),
        ("1,072", "1072", 1),
        ("Paris", "Paris", 1),
        (" new  york ", "New York", 1),
        ("B", ["A", "b"], 1),
        ("C", ["A", "b"], 0),
        ("\\text{Paris}", "Paris", 1),
        ("\\dfrac{1}{2}", "\\frac12", 1),
        ("72", "so it is 72.\n#### 72", 1),
        ("72", "We add: $\\boxed{72}$.", 1),
        ("71", "72", 0),
        ("", "72", 0),
    ],
)
def test_boxes_and_tags_hold_a_text_or_a_number(answer: str, truth: Any, expected: float) -> None:
    assert (
        score(last_box(f"<answer>1</answer> \\boxed{{2}}, no, \\boxed{{{answer}}}", truth))
        == expected
    )
    assert (
        score(answer_tag(f"\\boxed{{1}} <answer>2</answer>\n<answer>\n{answer}\n</answer>.", truth))
        == expected
    )
    assert score(answer_tag(f"<answer>It is $\\boxed{{{answer}}}$.</answer>", truth)) == expected
    assert score(last_box(answer, truth)) == score(answer_tag(answer, truth)) == 0


def test_the_answer_can_be_used_for_majority_votes() -> None:
    assert last_number("a 3 b 4", "4") == {"score": 1, "pred": "4"}
    assert last_box("\\boxed{ B }", "b") == {"score": 1, "pred": "B"}
    assert answer_tag("<answer> B", "b") == {"score": 0, "pred": ""}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>\na\n</think>\n\n<answer>\nb\n</answer>\n", 1),
        ("a</think><answer>b</answer>", 1),
        ("<think></think><answer>b</answer>", 1),
        ("<think>a</think><answer> </answer>", 0),
        ("<think>a</think>", 0),
        ("<answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("The template has written the first tag. a</think><answer>b</answer>", 1),
        ("Well: <think>a</think><answer>b</answer>", 0),
        ("<think>a</think>So <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer> I hope that helps", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a<think>b</think><answer>c</answer>", 0),
        ("", 0),
    ],
)
def test_the_format_is_thoughts_and_then_an_answer(response: str, expected: float) -> None:
    assert RULES["format"](response, None) == expected


@pytest.mark.parametrize(
    ("rule", "truth"), [("last_number", "seven"), ("boxed", " "), ("answer_tag", []), ("boxed", {})]
)
def test_a_ground_truth_that_no_answer_can_have_is_an_error(rule: str, truth: Any) -> None:
    with pytest.raises(DataError, match=f"the rule {rule} needs"):
        RULES[rule]("", truth)


@pytest.mark.parametrize("rule", ["last_number", "boxed", "answer_tag", "format"])
def test_a_long_response_takes_no_long_time(rule: str) -> None:
    start_s = time.monotonic()
    many = (
        "1",
        "1,",
        ",111",
        "\\boxed{",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "</think> <answer>",
    )
    for response in (
        *(text * 20_000 for text in many),
        f"<answer>{'1' * 50_000}</answer>",
        f"\\boxed{{{'x' * 50_000}}}",
    ):
        assert score(RULES[rule](response, "7")) == 0
    assert time.monotonic() - start_s < 5


# The data source


@pytest.mark.parametrize(
    ("data_source", "rule"),
    [
        ("openai/gsm8k", gsm8k),
        ("gsm8k", gsm8k),
        ("gsm8k/mine", gsm8k),
        ("gsm8k_flexible", gsm8k_flexible),
        ("exact_match/capitals", exact_match),
        ("lighteval/MATH", math_boxed),
        ("DigitalLearningGmbH/MATH-lighteval", math_boxed),
        ("HuggingFaceH4/MATH-500", math_boxed),
        ("math", math_boxed),
        ("math_dapo", math_dapo),
        ("math_dapo_reasoning", math_dapo),
        ("aime_2024", math_dapo),
        ("aime2025", math_dapo),
        ("HuggingFaceH4/aime_2024", math_dapo),
    ],
)
def test_the_data_source_chooses_the_rule(data_source: str, rule: object) -> None:
    assert rule_for(data_source) is rule


@pytest.mark.parametrize(
    "data_source", ["train", "gsm8k_train", "mathematics", "hiyouga/geometry3k", "claimed"]
)
def test_an_unknown_data_source_is_an_error_that_says_what_there_is(data_source: str) -> None:
    with pytest.raises(DataError) as caught:
        rule_for(data_source)
    said = str(caught.value)
    assert (
        f"data_source {data_source!r}; set reward.functions to a rule (exact_match, position_match, gsm8k,"
        in said
    )
    assert "FILE.py:FUNCTION" in said
