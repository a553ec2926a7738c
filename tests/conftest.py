"""One thread per process: the machine may have two cores and four ranks, and sums must not depend on the threads."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
