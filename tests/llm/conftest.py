import sys
from pathlib import Path

import pytest
import torch

# Lets any test `import families`, whatever the import mode.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread():
    """With one thread, sums have a fixed order, and tests do not wait for busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
