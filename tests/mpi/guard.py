"""A parent for a rank that will be killed, so that the launcher does not see it and end the other ranks too."""

import os
import signal
import subprocess
import sys
import time


def guard(seconds=8.0):
    """Run this program again as a child, and hide a kill of it from the launcher, which would kill the others too."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # MPICH's launcher tells of an abnormal end by it
    start = time.monotonic()
    code = subprocess.call(
        [sys.executable, *sys.argv], env={**os.environ, "EPCY_JOB": "child"}, close_fds=False
    )
    sys.stdout.write(f"ended with {code} after {time.monotonic() - start:.1f} s\n")
    sys.stdout.flush()
    time.sleep(seconds if code < 0 else 0)
    sys.exit(abs(code))
