"""Which configuration does a command line produce? Flags, overrides and YAML, composed and checked.

Hydra and OmegaConf are used here, and in packages that hand jobs to Hydra's launchers.
"""
