"""`python -m rolepool`."""

import sys

from rolepool.cli import main

sys.exit(main())
