"""LMCache's own bench of an L2 adapter, which also compares what it loads. Owns nothing. Runs in
LMCache's environment, as ``lmcache_bench.py ARGUMENTS`` of ``lmcache bench l2``.
"""

import os
import sys

os.environ["LMCACHE_DISABLE_BANNER"] = "1"

from lmcache.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "l2"]
    main()
