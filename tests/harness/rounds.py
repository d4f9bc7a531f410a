"""How many examples tests of random tables take: few in `make test`, `RANDOM_TIMES` times as many in `make test-random`."""

import os

TIMES = int(os.environ.get("RANDOM_TIMES", "1"))
