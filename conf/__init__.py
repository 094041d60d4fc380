"""The YAML that ships with rlox; installed as ``rlox_cli.conf`` because Hydra reads it as a package."""
