"""Ports of the tests' fake servers."""

import os
import re

import pytest

from pageweaver_sglang.serving_ab import launch


@pytest.fixture(autouse=True)
def _ports_of_this_process(monkeypatch):
    """So that tests that run at the same time don't take each other's."""
    worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "0")))
    first = 20000 + 1500 * (worker % 8)
    monkeypatch.setattr(launch, "SPARE_PORTS", range(first, first + 1400))  # some take a few behind theirs
