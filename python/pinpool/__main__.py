"""`python -m pinpool` is the command `pinpool`."""

import sys

from pinpool.cli import main

if __name__ == "__main__":
    sys.exit(main())
