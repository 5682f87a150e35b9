import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _project_root(monkeypatch):
    """Paths in configs are relative to the project root."""
    monkeypatch.chdir(ROOT)
