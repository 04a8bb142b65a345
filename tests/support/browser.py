"""Debian's Chromium without a screen, driven over chromedriver; Debian packages that tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
INSTALL_S = 240.0
LONG_S = 20.0


def why_not(*packages: str, **programs: str) -> str:
    """Install Debian packages whose programs are missing. Return why that is not possible; empty: all are there."""
    wanted = [package for package in packages if shutil.which(programs.get(package.replace("-", "_"), package)) is None]
    if not wanted:
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"{', '.join(wanted)} missing, and only root on Debian can install them"
    # Other workers of pytest may install at the same time, and a service that is installed must not be started.
    install = ["apt-get", "install", "-y", "--no-install-recommends", "-o", f"DPkg::Lock::Timeout={INSTALL_S:.0f}", *wanted]
    environ, deadline = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}, time.monotonic() + INSTALL_S
    try:
        for command in (install, ["apt-get", "update"], install):
            left_s = max(1.0, deadline - time.monotonic())
            done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False, env=environ)
            if command is install and done.returncode == 0:
                return ""
    except subprocess.TimeoutExpired:
        return f"installing {', '.join(wanted)} took more than {INSTALL_S:g} s"
    return f"{', '.join(wanted)} cannot be installed: {done.stderr.strip().splitlines()[-1:]}"


@contextmanager
def browser(*flags: str) -> Iterator[Any]:
    """Start a browser with an empty profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="rdzv-chromium-") as profile:
        options = Options()
        options.binary_location = shutil.which("chromium") or "chromium"
        for flag in (*FLAGS, *flags, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)
        try:
            yield driver
        finally:
            driver.quit()


def look(driver: Any, width: int, height: int, scheme: str = "light") -> None:
    """Set the size of the window and the colours that the user prefers."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def until(holds: Callable[[], object], what: str, limit_s: float = LONG_S) -> float:
    """Poll until it holds. Return how long it took."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < limit_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - begin
