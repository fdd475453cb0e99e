"""For all tests: what must be set before the first import of torch."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests run beside the processes that they start; spinning threads would starve these
