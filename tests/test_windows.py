"""Without what Windows lacks, rlox is imported whole, and its commands work."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_nothing_needs_what_windows_lacks(tmp_path):
    program = Path(__file__).parent / "helpers" / "like_windows.py"
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    failed = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert failed == [], done.stderr[-3000:]
    assert done.stdout.rstrip().endswith("done")
