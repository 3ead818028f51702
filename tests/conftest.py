"""Every test process computes on one thread: results do not depend on the machine, and ranks share two cores."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A dead name server must not stall the meeting of ranks.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# A shell that runs the tests in the background has SIGINT ignored, and every program they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.corpus import corpus  # noqa: E402, F401
from tests.etcd import breakable_etcd, private_etcd, store_settings  # noqa: E402, F401
