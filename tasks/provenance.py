"""Which code and which person: what is written beside outputs and changes so that they can be traced."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import subprocess
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path


@cache
def code_version() -> str:
    """Version of the package and, in a checkout with git at hand, the commit this process started from."""
    found, checkout = f"rlstages {version('rlstages')}", Path(__file__).resolve().parent.parent
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():  # else git would look in the folders above an installation
        return found
    describe = [git, "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=checkout, capture_output=True, text=True, check=False).stdout.strip()
    return f"{found} ({commit})" if commit else found


def who() -> str:
    """The person at the keyboard, as `name@host`; the number of the account where it has no name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return f"{name}@{platform.node()}"


def now() -> str:
    """The time in UTC to the second, ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
