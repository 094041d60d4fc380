"""What was typed? Flags, overrides and YAML, composed into validated configurations; else an error that helps.

Hydra and OmegaConf are used here, and where a package hands jobs to Hydra's launchers.
"""
