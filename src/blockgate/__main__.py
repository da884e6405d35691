"""`python -m blockgate`."""

import sys

from blockgate.cli import main

sys.exit(main())
