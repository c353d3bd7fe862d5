"""A taskset and a harness of verifiers: the model repeats the first letter of the prompt, in two
turns."""

from itertools import product

import httpx
import verifiers.v1 as vf


class Letter(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def repeats_the_letter(self, trace: vf.Trace) -> float:
        answers = [(message.content or "").split()[:1] for message in trace.assistant_messages]
        return answers.count([self.data.prompt[0]]) / 2


class Letters(vf.Taskset[Letter, vf.TasksetConfig]):
    def load(self):
        return [
            Letter(vf.TaskData(prompt=" ".join(letters)))
            for letters in product("abcdefgh", repeat=2)
        ]


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    """Runs in the process of the rollout. The harnesses of the package start programs with `uv`."""

    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages, headers = (
            [{"role": "user", "content": data.prompt}],
            {"Authorization": f"Bearer {secret}"},
        )
        async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                answer = (
                    (await client.post("/chat/completions", json=body)).raise_for_status().json()
                )
                messages += [
                    answer["choices"][0]["message"],
                    {"role": "user", "content": data.prompt},
                ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Letters", "TwoTurns"]
