"""Will a run work, and what will it cost? ``rlox train --check`` builds it, probes its environment and estimates."""
