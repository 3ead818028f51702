"""Every test process computes on one thread: results do not depend on the machine, and ranks share two cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A dead name server must not stall the meeting of ranks.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from tests.corpus import corpus  # noqa: F401
from tests.etcd import breakable_etcd, private_etcd, store_settings  # noqa: F401
