"""A server's processes: all of them end with it, those too that nobody saw while their parent lived."""

import sys
import time

import pytest

from pageweaver_sglang.bench.server import ServerError, ServerProcess
from tests.cli.interruptible import alive

# Starts a helper in a session of its own that ignores SIGTERM, says its id, and dies at once.
SERVER = """
import os, subprocess, sys
helper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
started = subprocess.Popen([sys.executable, "-c", helper], start_new_session=True, stdout=subprocess.PIPE)
started.stdout.readline()
print(started.pid, flush=True)
os._exit(3)
"""


def test_a_helper_that_outlives_its_parent_is_ended(tmp_path):
    server = ServerProcess([sys.executable, "-c", SERVER], tmp_path / "log", patience=0.2)
    other = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "other")
    with other:
        with server:
            while server.exit_code() is None:  # nobody looks at its processes meanwhile
                time.sleep(0.02)
            helper = int(server.text())
            assert server.pids() == [helper]
            with pytest.raises(ServerError, match="exit code 3"):
                server.wait_ready(1)
        assert not alive(helper)
        assert other.pids() == [other.pid], "another server's processes are not touched"
