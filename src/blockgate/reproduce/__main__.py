"""`python -m blockgate.reproduce PLAN`: what the processes of `blockgate reproduce` run."""

import sys
from pathlib import Path

from blockgate.reproduce.worker import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
