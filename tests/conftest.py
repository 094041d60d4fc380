import sys
from pathlib import Path

# `import probes` from any test, whatever the import mode.
sys.path.insert(0, str(Path(__file__).parent))
