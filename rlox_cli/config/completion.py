"""Tab completion of overrides, with Hydra's own completion engine."""

from __future__ import annotations

import os
import re

import typer

# Choices that decide which keys there are, with the first of several values.
_CHOICE = re.compile(
    r"((?:algo|buffer|dataset|logger|experiment|hydra/\w+)=)(\[[\w,]*\]|[^\[\](){}\s,'\"*]+)(,[^(){}\s]*)?"
)


class _Replacement(str):
    """A candidate that replaces what was typed. Typer would drop a candidate that does not begin with it."""

    def startswith(self, *args) -> bool:
        return True


def complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the candidates for the word at the cursor.

    These are groups and choices (``algo=ppo``), keys of what the line chooses (``algo.clip_eps=``, also if another
    trainer's name for it was typed), run folders after ``resume=``, and files after ``dataset=``.
    """
    if incomplete.startswith("resume="):
        from glob import glob

        typed = incomplete.partition("=")[2]
        return sorted(f"resume={os.path.dirname(path)}" for path in glob(f"{typed}*/**/metrics.jsonl", recursive=True))
    if incomplete.startswith("dataset="):
        from rlox_cli.config.schema import dataset_files

        return [f"dataset={path}" for path in dataset_files(incomplete.partition("=")[2])]
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.plugins.completion_plugin import CompletionPlugin

    from rlox_cli.config.overrides import keys_with
    from rlox_cli.config.schema import CONFIG_MODULE, CONFIG_NAME, register
    from rlox_cli.config.shipped import SCHEMA_FOLDER

    register()
    GlobalHydra.instance().clear()
    with initialize_config_module(CONFIG_MODULE, version_base="1.3", job_name="rlox"):
        loader = GlobalHydra.instance().config_loader()
        plugin = next(iter(Plugins.instance().discover(CompletionPlugin)))(loader)
        chosen = [
            match[1] + match[2] for word in ctx.params.get("overrides") or () if (match := _CHOICE.fullmatch(word))
        ]
        found = plugin._query(config_name=CONFIG_NAME, line=" ".join([*chosen, incomplete]))
        if not found:  # a choice that does not exist here, such as one from the folder of -cd
            found = plugin._query(config_name=CONFIG_NAME, line=incomplete)
    # The folder has no choices, and algo=PRESET sets the key.
    found = [word for word in found if word not in (SCHEMA_FOLDER, "preset=")]
    # Hydra offers the items of a list, which nobody types one by one.
    found = [f"{word[:-1]}=" if word[:-1] in keys_with("list") else word for word in found]
    found += [key for key in ("output_dir=", "resume=") if key.startswith(incomplete)]
    if not found:
        from rlox.config.migration import completions

        return [_Replacement(key) for key in completions(incomplete)]
    return sorted(found)
