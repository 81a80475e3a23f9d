"""``python -m stratakv``: the command line. Owns nothing; see ``cli``."""

import sys

from stratakv.cli import main

sys.exit(main())
