"""What all tests share."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
