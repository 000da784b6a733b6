"""What every test gets. The environment is set here, before anything imports torch."""

from __future__ import annotations

import os

# Tests run side by side and start processes of their own; one thread each is faster than all of them fighting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
