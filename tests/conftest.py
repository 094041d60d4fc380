import os
import signal
import sys
from pathlib import Path

# `import probes` from any test, whatever the import mode.
sys.path.insert(0, str(Path(__file__).parent))

# Here and in every process a test starts: OpenMP threads that spin while another process wants the core make a test ten
# times slower. What is said of threads is tested by setting them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background has Ctrl-C ignored, and so would be every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
