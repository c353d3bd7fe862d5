"""What the tests with real processes share: where worker processes find the role classes of the tests."""

import os
from pathlib import Path

HERE = Path(__file__).parent
IMPORT_PATHS = [str(HERE.parents[1] / "src"), str(HERE)]

# Inherited by every Ray that a test starts, and by its worker processes.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*IMPORT_PATHS, *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.pop("RAY_ADDRESS", None)
