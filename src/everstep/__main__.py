"""`python -m everstep` is `everstep`."""

import sys

from everstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
