"""`python -m blockgate.lab.reproduce PLAN`: what the processes of `blockgate reproduce` run."""

import sys
from pathlib import Path

from blockgate.lab.reproduce.worker import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
