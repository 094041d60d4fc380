"""``rlox generate``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlox_cli.terminal.options import Checkpoint, Imports
from rlox_cli.terminal.process import report_exceptions


def generate(
    checkpoint: Checkpoint,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Texts to complete; by default the lines of standard input."),
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Number of completions for each prompt.")] = 1,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum length; by default as in training.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0: always the most likely token; by default as in training.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample from the k most likely tokens; 0: all.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens that together have this probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample from tokens with at least this share of the highest probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each prompt.")] = False,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Each PROMPT is JSON: a list of messages, or an object with it as prompt, and with tools."
        ),
    ] = False,
    imports: Imports = None,
) -> None:
    """Complete prompts with a trained language model.

    \b
    rlox generate outputs/… "3+4="
    rlox generate outputs/… -n 4 --temperature 0.7 "Once upon a time"
    rlox generate outputs/… --json < prompts.txt
    rlox generate outputs/… --chat '[{"role": "user", "content": "Hello"}]'
    """
    with report_exceptions("generate"):
        from rlox_cli.run.evaluate import generate

        settings = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
        }
        generate(checkpoint, prompts or [], n, seed, settings, json, chat, imports or [])
