"""What holds for all tests."""

import os
import re

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # some GPU tests run without it
    pass
else:
    # Nothing depends on how fast the machine is.
    slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("pageweaver", settings.default, **slow)
    settings.load_profile("pageweaver")


@pytest.fixture(autouse=True)
def _ports_of_this_process(monkeypatch):
    """So that tests that run at the same time don't take each other's."""
    from pageweaver_sglang.serving_ab import launch

    worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "0")))
    first = 20000 + 1500 * (worker % 8)
    monkeypatch.setattr(launch, "SPARE_PORTS", range(first, first + 1400))  # some take a few behind theirs
