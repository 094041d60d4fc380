"""The YAML files that ship with rlox; installed as ``rlox_cli.conf``, because Hydra reads them from a package."""
