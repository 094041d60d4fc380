"""Will it work, and what will it cost? ``rlox train --check``: build, probe the environment, estimate."""
