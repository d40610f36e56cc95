"""Train one drafter for so many minutes of processor time, whatever else the machine does.

    OMP_NUM_THREADS=1 python tools/experiments/train_rivals.py RUN.toml [KEY=VALUE]...

As `python -m blockdraft.train`, but `max_minutes` and the other times of the run count the seconds
in which this process computed, all threads together. With one thread that is the time of one free
core, so drafters that were trained beside other programs have had the same budget.
"""

import sys
import time

from blockdraft.train import run_state
from blockdraft.train.__main__ import main

if __name__ == "__main__":
    vars(run_state)["monotonic"] = time.process_time
    raise SystemExit(main(sys.argv[1:]))
