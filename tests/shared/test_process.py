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


def test_as_many_files_are_allowed_as_the_system_gives() -> None:
    subprocess.run([sys.executable, "-c", ALLOWED], check=True)
