import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # tests import `reference`
# a shell's background job ignores Ctrl-C, and so would what tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("YOLOFLEET_OFFLINE", "1")  # a name that is not in the cache must not be fetched
