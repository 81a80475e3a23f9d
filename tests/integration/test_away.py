"""Tests on a device of torch's own run in a process of their own: torch cannot forget a device, and
who asks it for an accelerator would be told of that one for the rest of the process."""

import subprocess
import sys
from pathlib import Path

AWAY = Path(__file__).parents[1] / "away"


def test_steps_and_sampling_wait_for_a_device_once_a_step():
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "not long", str(AWAY))
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-8000:]
