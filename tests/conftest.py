import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # tests import `reference`
os.environ.setdefault("YOLOFLEET_OFFLINE", "1")  # a name that is not in the cache must not be fetched
