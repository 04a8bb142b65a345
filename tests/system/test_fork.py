"""Objects that a forked child must not free."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rdzv.system.fork import never_free_in_children

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PROGRAM = """
import os, sys
from rdzv.system.fork import never_free_in_children

class Owner:
    def __del__(self):
        os.write(1, b"freed " if os.getpid() == parent else b"freed in the child ")

parent = os.getpid()
owner = Owner()
never_free_in_children(owner)
child = os.fork()
if child == 0:
    del owner
    sys.exit(3)
os.write(1, b"%d " % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
del owner
"""


class Owner:
    """An object to keep."""


def test_only_the_parent_frees_the_object():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "3 freed "


def test_an_object_that_is_freed_is_forgotten():
    owner = Owner()
    never_free_in_children(owner)
    del owner
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
