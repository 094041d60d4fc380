import sys
from pathlib import Path

import pytest
import torch

# `import toy` from any test, whatever the import mode.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums have one order, and cores that others use are not waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
