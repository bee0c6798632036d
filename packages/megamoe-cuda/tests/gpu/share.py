"""pytest plugin `-p share`: processes that run the same tests share them out, each taking the next that none has taken.

$CLAIMS is a folder, empty at first, in which each test taken is a file.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

CLAIMS = Path(os.environ["CLAIMS"])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """None lets the test run; True means that it is dealt with."""
    name = hashlib.sha256(item.nodeid.split("/")[-1].encode()).hexdigest()
    try:
        (CLAIMS / name).touch(exist_ok=False)
    except FileExistsError:
        item.session._setupstate.teardown_exact(nextitem)  # what an earlier test left set up for this one
        return True
    return None
