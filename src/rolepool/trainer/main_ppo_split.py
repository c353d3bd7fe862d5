"""`python -m rolepool.trainer.main_ppo_split`: `main_ppo` with actor and critic in separate
pools."""

import sys
from functools import partial
from pathlib import Path

from rolepool.trainer import main_ppo

main = partial(
    main_ppo.main, module="main_ppo_split", split_file=str(Path(__file__).with_suffix(".yaml"))
)

if __name__ == "__main__":
    sys.exit(main())
