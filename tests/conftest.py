import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a script; what the tests start would be deaf to it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Properties are about values: how long an example takes (fsync on a busy disk) decides nothing.
settings.register_profile("miles", deadline=None)
settings.load_profile("miles")

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also the tests marked `long`: hours")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="only with --long"))


@pytest.fixture(autouse=True)
def _project_root(monkeypatch):
    """Paths in configs are relative to the project root."""
    monkeypatch.chdir(ROOT)
