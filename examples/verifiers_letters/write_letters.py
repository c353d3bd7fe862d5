"""Writes letters.jsonl, which has a row for each task of the taskset."""

import json
from pathlib import Path

import verifiers.v1 as vf

with Path("letters.jsonl").open("w") as file:
    for task in vf.load_taskset(vf.TasksetConfig(id="my_letters")):
        row = {
            "prompt": [{"role": "user", "content": task.data.prompt}],
            "extra_info": {"index": task.data.idx},
        }
        file.write(json.dumps(row) + "\n")
