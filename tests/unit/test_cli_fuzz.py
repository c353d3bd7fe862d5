"""Whatever is typed, the command line answers with 0 or 2, and never with a traceback."""

from __future__ import annotations

import contextlib
import io
import random
import string
from collections.abc import Callable
from pathlib import Path

import pytest

from rolepool.cli import main
from rolepool.config.schema import Key, all_keys, all_sections

WILD_PER_CALL, TAME_PER_CALL = 10, 3
"""Wild strings are refused one by one, so many share a call; tame ones mostly pass and reach the
planner together."""

KEYS = list(all_keys().values())
NAMES = [*all_keys(), *all_sections()]

WORDS = [
    "", " ", "null", "~", "true", "False", "yes", "on", "???", "auto", "split", "custom", "gae", "grpo", "native",
    "a", "b", "recipes/demo.yaml", "recipes/shapes/qwen2.5-0.5b", "~nobody/x", "/", "..", "a/b", "x" * 300,
    "some words", "-", "--json",
]  # fmt: skip
NUMBERS = [
    "0", "1", "2", "3", "4", "8", "16", "64", "-1", "-0", "007", "0o17", "0x10", "0b1", "1_000", "1e3", "1e-6", ".5",
    "5.", "1e400", "-1e400", ".inf", "-.inf", ".nan", "2147483647", "2147483648", "9" * 30, "9" * 400, "9" * 5000,
    "0x" + "f" * 5000, "1:30", "1,5", "0.1", "0.3333333333333333333333", "1e-320",
]  # fmt: skip
GARBAGE = [
    "[", "]", "{", "}", "[[", "{{", "[1", "{a", "{a:", "[1,,2]", "{a:1,a:2}", "{,}", "- a", "? a", "? a : b", ": ",
    "a: b", "a:b", "&a [*a]", "&a", "*a", "!!binary /w==", "!!set {a}", "!!timestamp 2001-01-01",
    "!!python/name:os.system", "!x y", "!!int x", "!!float .", "!!null x", "| a", "> a", "%", "@", "`", "'", '"',
    "'a", '"a', '"\\ud800"', '"\\x00"', '"\\e[31m"', "#", "a #b", "2001-01-01", "<<: *a", "{<<: {a: 1}}", "\t", "\n",
    "a\nb", "a\n- b", "\\", "\r\n", "---", "...", "--- a\n--- b", "\ufeff", "\0",
]  # fmt: skip
REFERENCES = [
    "${", "${}", "${a", "$", "$$", "${a.b}", "${trainer}", "${trainer.nnodes}", "${trainer.seed}",
    "x${trainer.seed}y", "${.a}", "${..a}", "${oc.env:HOME}", "${oc.env:NO_SUCH_VARIABLE}", "${oc.env:A,b}",
    "${oc.select:a}", "${oc.decode:'[1'}", "${oc.create:{}}", "${${trainer.device}}", "${placement}",
    "${placement.pools}", "[${trainer.nnodes}]", "{a: ${b}}", "\\${a}", "${data.seed", "${oc.dict.keys:trainer}",
    "${nope:1}", "${trainer[nnodes]}", "${a.${b}}", "'${'", "${trainer.nnodes}${", "${critic.optim.lr}",
]  # fmt: skip
UNICODE = [
    "ü", "数", "🙂", "\u202e", "\u2028", "\udcff", "a\u0301", "²", "٣", "Ⅷ", "\x85", "\x1b[0m", "\x7f", "\uffff", "ﬀ",
]  # fmt: skip
FLAGS = [
    "--json", "--strict", "--inventory=8,8,4", "--inventory=", "--inventory=x", "--inventory=0", "--inventory=4x4",
    "--gpu-memory=80", "--gpu-memory=0.001", "--gpu-memory=x", "--gpu-memory=", "--help=1", "--nope", "--nope=1",
    "-x", "--", "-", "---", "-1", "--js",
]  # fmt: skip


def nested(draw: random.Random) -> str:
    opening, closing = draw.choice(
        [("[", "]"), ("{a: ", "}"), ("{a:[", "]}"), ("{", "}"), ("(", ")"), ("${", "}")]
    )
    depth = draw.choice([1, 2, 5, 20] if opening == "${" else [1, 2, 5, 30, 100, 400, 2000])
    return (
        opening * depth
        + draw.choice(["", "1", "a"])
        + closing * draw.choice([depth, depth, depth - 1])
    )


def noise(draw: random.Random) -> str:
    alphabet = draw.choice(
        [
            string.printable,
            string.punctuation,
            "[]{},:&*!|>'\"%@`#- \n",
            "${}.:ab",
            "é\u0300漢\u200b\ud800a=",
        ]
    )
    return "".join(draw.choice(alphabet) for _ in range(draw.randrange(12)))


def flow(draw: random.Random) -> str:
    """A list or a mapping of anything."""
    items = [anything(draw) for _ in range(draw.randrange(4))]
    if draw.random() < 0.5:
        return "[" + ",".join(items) + "]"
    names = ["a", "b", "per_node", "share", "1", "a b", "'x'", "hidden_size", "null"]
    return (
        "{"
        + ",".join(f"{draw.choice(names)}{draw.choice([':', ': '])}{item}" for item in items)
        + "}"
    )


def anything(draw: random.Random) -> str:
    pick = draw.random()
    if pick < 0.12:
        return flow(draw)
    if pick < 0.18:
        return nested(draw)
    if pick < 0.3:
        return noise(draw)
    return draw.choice(draw.choice([WORDS, NUMBERS, GARBAGE, REFERENCES, UNICODE]))


def mutated(draw: random.Random, name: str) -> str:
    """A key with a slip, or one that is no key at all."""
    place = draw.randrange(len(name))
    return draw.choice(
        [
            lambda: name[:place] + name[place + 1 :],
            lambda: name[:place] + draw.choice(string.printable) + name[place:],
            lambda: name[:place] + draw.choice(UNICODE) + name[place + 1 :],
            lambda: f"{name}.{draw.choice(['a', '1', 'nnodes', ''])}",
            lambda: name.rsplit(".", 1)[-1],
            lambda: name.upper(),
            lambda: draw.choice(
                [
                    ".",
                    "..",
                    "",
                    " ",
                    "[0]",
                    "a[0]",
                    "placement.pools.",
                    "critic.megatron.x",
                    "data.image_key",
                ]
            ),
            lambda: f"placement.pools.{noise(draw)}",
            lambda: (
                f"actor_rollout_ref.model.override_config.{draw.choice(['a', 'a.b', 'hidden_size', 'vocab_size', '1'])}"
            ),
            lambda: noise(draw),
        ]
    )()


def wild(draw: random.Random) -> str:
    """A string that looks more or less like an override."""
    pick = draw.random()
    if pick < 0.05:
        return anything(draw)
    name = draw.choice(NAMES)
    name = mutated(draw, name) if draw.random() < 0.35 else name
    return (
        draw.choice(["", "", "", "+", "++", "+++", "~", "-", " "])
        + name
        + draw.choice(["=", "=", "=", " = ", "", "=="])
        + anything(draw)
    )


def right(draw: random.Random, key: Key) -> str:
    """A value that the key's type allows, though perhaps not together with other keys."""
    if key.path == "placement.pools":
        return draw.choice(
            [
                "{a:[2],b:[2]}",
                "{a:{per_node:[1],share:0.5},b:{per_node:[1],share:0.5}}",
                "{a:[0,4]}",
                "{a:[9]}",
            ]
        )
    if key.type_text.startswith("a mapping"):
        sizes = [
            "hidden_size",
            "num_attention_heads",
            "vocab_size",
            "num_key_value_heads",
            "num_experts",
            "head_dim",
            "x",
        ]
        return "{" + draw.choice(sizes) + ": " + draw.choice([*NUMBERS, "null", "x", "[1]"]) + "}"
    if key.path.startswith("placement.roles."):
        return draw.choice(["a", "b", "null"])
    if key.type_text.startswith("one of "):
        return draw.choice(key.type_text.removeprefix("one of ").split(", "))
    if key.type_text.startswith("true"):
        return draw.choice(["true", "false"])
    if key.type_text.startswith("an integer"):
        return draw.choice(["1", "2", "3", "4", "8", "64", "256", "512", "100000"])
    if key.type_text.startswith("a number"):
        return draw.choice(["0", "0.1", "0.5", "1", "1e-6"])
    if key.is_text:
        return draw.choice(
            [
                "recipes/shapes/qwen2.5-0.5b",
                "recipes/shapes/deepseek-llm-7b-chat",
                *WORDS,
                *UNICODE[:5],
            ]
        )
    return draw.choice(["[]", "[console]", "[a.parquet]", "[0.9,0.95]"])


def tame(draw: random.Random) -> str:
    placement = [
        key
        for key in KEYS
        if key.path.startswith(("placement.", "trainer.n", "actor_rollout_ref.model."))
    ]
    model = [
        key
        for key in KEYS
        if key.path in ("actor_rollout_ref.model.path", "actor_rollout_ref.model.override_config")
    ]
    key = draw.choice(draw.choice([KEYS, KEYS, KEYS, placement, placement, model]))
    return f"{draw.choice(['', '', '+', '++'])}{key.path}={right(draw, key)}"


MODEL = "actor_rollout_ref.model.path=recipes/shapes/qwen2.5-0.5b"


def plan_of_wild(draw: random.Random) -> list[str]:
    """After `--` nothing is an option, so that one string that looks like one does not hide the
    others."""
    return [
        "plan",
        draw.choice(["--json", "--strict"]),
        "--",
        *(wild(draw) for _ in range(WILD_PER_CALL)),
    ]


def plan_of_tame(draw: random.Random) -> list[str]:
    starts = [[], [MODEL], ["recipes/demo_split.yaml"], [MODEL, "placement.strategy=split"]]
    options = [
        [],
        ["--json"],
        ["--strict"],
        ["--inventory", "8,2,0,4"],
        ["--gpu-memory", "4"],
        [draw.choice(FLAGS)],
    ]
    return [
        "plan",
        *draw.choice(starts),
        *(tame(draw) for _ in range(TAME_PER_CALL)),
        *draw.choice(options),
    ]


def config_of_anything(draw: random.Random) -> list[str]:
    keys = [
        draw.choice(NAMES),
        mutated(draw, draw.choice(NAMES)),
        anything(draw),
        "recipes/demo.yaml",
    ]
    return [
        "config",
        *draw.choice([[], ["--"], [draw.choice(FLAGS)]]),
        *(
            draw.choice([draw.choice(keys), wild(draw), tame(draw)])
            for _ in range(draw.randrange(3))
        ),
    ]


def train_of_anything(draw: random.Random) -> list[str]:
    return [
        "train",
        *draw.choice([[], ["--"], [draw.choice(FLAGS)]]),
        *(draw.choice([wild, tame, tame])(draw) for _ in range(draw.randrange(4))),
    ]


def command_of_anything(draw: random.Random) -> list[str]:
    return [anything(draw), *(wild(draw) for _ in range(draw.randrange(2)))]


def answer(arguments: list[str]) -> tuple[int, str]:
    """Exit code and what was printed, through streams as strict about encoding as a real
    terminal's."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    for stream in (out, err):
        stream.flush()
    return code, (out.buffer.getvalue() + err.buffer.getvalue()).decode()  # type: ignore[attr-defined]


NUM_CALLS = {
    plan_of_wild: 800,
    plan_of_tame: 667,
    config_of_anything: 300,
    train_of_anything: 300,
    command_of_anything: 100,
}
"""More than 10,000 strings."""
SLOW = pytest.param(1, id="all of them", marks=pytest.mark.slow)


@pytest.mark.parametrize("make", NUM_CALLS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("one_in", [pytest.param(6, id="one in six"), SLOW])
def test_any_strings_are_answered_with_0_or_2_and_no_traceback(
    make: Callable[[random.Random], list[str]],
    one_in: int,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    draw = random.Random(f"{make.__name__} 1")
    codes = set()
    for _ in range(NUM_CALLS[make] // one_in):
        arguments = make(draw)
        try:
            code, printed = answer(arguments)
        except BaseException as error:
            error.add_note(f"rolepool {arguments!r}")
            raise
        assert code in (0, 2), arguments
        assert "Traceback" not in printed, arguments
        assert code == 0 or "error: " in printed or "--strict" in arguments, arguments
        codes.add(code)
    assert codes <= {0, 2}
    assert 2 in codes
