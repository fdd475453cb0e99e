"""What a process owes its neighbours, and itself."""

import subprocess
import sys

ALLOWED = """
import resource
from shared.process import MAX_FILES, allow_many_files
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
allow_many_files()
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (min(most, MAX_FILES) if most != resource.RLIM_INFINITY else MAX_FILES)
allow_many_files()
"""

HEAP = """
import gc
from shared.process import settle_heap
held = [[] for _ in range(1000)]
settle_heap()
assert gc.get_freeze_count() > len(held) and not any(each is held[0] for each in gc.get_objects())
assert gc.isenabled() and gc.get_threshold()[0] > 700
"""


def test_what_was_loaded_is_not_collected_again() -> None:
    subprocess.run([sys.executable, "-c", HEAP], check=True)


def test_as_many_files_are_allowed_as_the_system_gives() -> None:
    subprocess.run([sys.executable, "-c", ALLOWED], check=True)
