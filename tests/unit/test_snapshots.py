"""The folders of snapshots in shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rolepool.trainer.snapshots import remove_left_behind

HOLD = "import sys, time; from pathlib import Path; from rolepool.trainer.snapshots import _lock\n"
HOLD += "held = _lock(Path(sys.argv[1])); print(held is not None, flush=True); time.sleep(60)"


def test_only_snapshots_of_drivers_that_were_killed_are_removed(tmp_path: Path) -> None:
    held, dead, other = (tmp_path / name for name in ("rolepool-1-a", "rolepool-2-b", "something"))
    for folder in (held, dead, other):
        (folder / "0").mkdir(parents=True)
    driver = subprocess.Popen([sys.executable, "-c", HOLD, str(held)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "True\n"
        remove_left_behind(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rolepool-1-a", "something"]
    finally:
        driver.kill()
        driver.wait()
    remove_left_behind(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["something"]
