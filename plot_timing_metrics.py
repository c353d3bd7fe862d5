"""Plots of console logs: `python plot_timing_metrics.py LOG [LOG...] --output-dir DIR`. The same as `rolepool plot`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))  # works in a checkout that is not installed

from rolepool.cli import main

sys.exit(main(["plot", *sys.argv[1:]]))
