"""Run the command line as `python -m umbra`."""

import sys

from umbra.cli import main

if __name__ == "__main__":
    sys.exit(main())
