"""Run the command line as `python -m umbra`; a supervised process ends with its parent."""

import sys

from umbra.cli import main
from umbra.services.process.parent import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
