"""Test blockdraft on one CUDA machine.

    python tools/gpu_check.py OUT               all parts, in 25 minutes at most
    python tools/gpu_check.py OUT               once more: goes on with what is not done yet
    python tools/gpu_check.py OUT --parts environment,tests
    python tools/gpu_check.py OUT --rehearse    all of it with tiny models on a CPU, in minutes

Writes OUT/report.json and OUT/report.md after each part. docs/gpu.md says more.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# It runs in a checkout, also where nothing is installed.
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gpucheck.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
