"""How long a judge behind HTTP takes to score a batch: some calls at a time against one after
another.

    python benchmarks/judge.py [--samples 512] [--at-once 64] [--latency-ms 47]

A stub of an OpenAI-compatible server answers each request after the latency. The reward function is
the example of docs/rewards.md, an async function that sends a request for each response. The same
responses are scored in four ways, all of them completely: with --at-once calls at a time and one
after another, and with the same function written without async in --at-once processes and in one.
Prints the seconds of each, and the ratio. Goal: under 1 s for the first one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from rolepool.config import load_config
from rolepool.data.retries import FIRST_WAIT_S
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_process import ScoringProcesses
from rolepool.data.reward_signatures import ResponseRow
from rolepool.data.rewards import Reward, RewardFunction

ROOT = Path(__file__).parent.parent


# --- the server ---------------------------------------------------------------------------------------------------


@contextmanager
def judge_server(latency_s: float) -> Iterator[str]:
    """A server in a process of its own that gives every chat the grade 7. Yields the URL for chat
    completions."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(
        target=_serve, args=(theirs, latency_s), daemon=True
    )
    server.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/v1/chat/completions"
    finally:
        server.terminate()
        server.join()


def _serve(channel: Connection, latency_s: float) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All requests of one connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                assert length is not None
                asked = json.loads(await reader.readexactly(int(length[1])))
                await asyncio.sleep(latency_s)
                message = {"role": "assistant", "content": "7"}
                body = json.dumps(
                    {"model": asked["model"], "choices": [{"index": 0, "message": message}]}
                ).encode()
                kind = b"Content-Type: application/json\r\n"
                writer.write(
                    b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (kind, len(body), body)
                )
                if b"connection: close" in head.lower():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed the connection
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        channel.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


# --- the reward ---------------------------------------------------------------------------------------------------


def example() -> str:
    """The judge of docs/rewards.md."""
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(# judge\.py\n.*?)```", page, re.DOTALL)
    assert found is not None, "docs/rewards.md has no example that begins with # judge.py"
    return found[1]


def without_async(text: str) -> str:
    """The same judge as a plain function."""
    return text.replace("async def", "def").replace(
        "await asyncio.to_thread(ask, question)", "ask(question)"
    )


def reward_of(file: Path, num_at_once: int, first_wait_s: float = FIRST_WAIT_S) -> Reward:
    config = load_config(overrides=[f"custom_reward_function.path={file}"]).config
    function = load_reward_function(config)
    assert isinstance(function, RewardFunction)
    keys = config.custom_reward_function
    return ScoringProcesses(function, keys, num_at_once, first_wait_s=first_wait_s)


def seconds(reward: Reward, num_samples: int, num_at_once: int) -> float:
    inputs = {"data_source": "stub", "ground_truth": "4", "extra_info": {}}
    rows = [
        ResponseRow(f"row {number}", {**inputs, "solution_str": f"It is {number}."})
        for number in range(num_samples)
    ]
    reward.score_rows(rows[:num_at_once])  # starts the processes
    begin_s = time.perf_counter()
    scores = [scored.score for scored in reward.score_rows(rows)]
    duration_s = time.perf_counter() - begin_s
    assert scores == [0.7] * num_samples
    return duration_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--latency-ms", type=float, default=47.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, judge_server(options.latency_ms / 1000) as url:
        os.environ["JUDGE_URL"] = url
        texts = {"async function": example(), "plain function": without_async(example())}
        print(f"{options.samples} responses, {options.latency_ms:g} ms each")
        for name, text in texts.items():
            file = Path(folder) / f"{name.split()[0]}_judge.py"
            file.write_text(text, encoding="utf-8")
            together_s = seconds(reward_of(file, options.at_once), options.samples, options.at_once)
            alone_s = seconds(reward_of(file, 1), options.samples, 1)
            print(
                f"{name}: {together_s:.2f} s with {options.at_once} at a time, {alone_s:.2f} s one after another, "
                f"{alone_s / together_s:.1f}x"
            )


if __name__ == "__main__":
    main()
