"""``rlox bench data``, ``rlox bench train`` and ``rlox bench learn``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.config.completion import complete
from rlox_cli.terminal.exits import reported
from rlox_cli.terminal.options import PASS_ON, Imports

bench = typer.Typer(help="Measure rlox against its peers on this machine.", no_args_is_help=True)


@bench.command()
def data(
    peer_python: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="An interpreter that has peers this one lacks: the original rlox, Stable-Baselines3, TorchRL, "
            "gymnasium. As often as you like.",
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Operations or groups to measure: gae, buffers, …")
    ] = None,
    samples: Annotated[int, typer.Option(min=3, help="Timings of each system, operation and size.")] = 210,
    rounds: Annotated[int, typer.Option(min=1, help="Times the systems take turns.")] = 3,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write data.json and data.png there.")] = None,
) -> None:
    """Time every operation of the data plane: environments, buffers, advantages, tokens.

    Each system runs in a process of its own with one thread, and they take turns; only ratios of one run mean
    anything. A ratio is the peer's median time over ours: above 1, rlox is faster.

    \b
    rlox bench data                              against NumPy and what else is installed here
    rlox bench data --only 'gae|kl' --rounds 5
    rlox bench data --peer-python ~/venvs/original/bin/python --out benchmarks
    """
    with reported("bench"):
        from rlox_cli.bench.data import main

        main(peer_python or [], only, samples, rounds, out)


@bench.command(name="train")
def bench_train(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CASE",
            help="ppo, a2c, dqn, sac, custom, solve, process, busy, all by default; grpo, grpo-sum, grpo-large, dpo.",
        ),
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Environment steps of ppo, a2c and custom, 100,000 by default; updates of grpo… and dpo. As often as "
            "you like.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times the systems take turns; round k has seed k.")] = 3,
    peer_python: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="An interpreter that has Stable-Baselines3, the original rlox, or TRL."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write train.json and train.png there.")] = None,
) -> None:
    """Time whole trainings, end to end, with what each system learned beside its speed.

    Each training has a process of its own with one thread and equal settings, and systems take turns; only ratios of
    one run mean anything. CPU seconds are the training call's alone; wall seconds of ppo are those of each system's
    better number of threads.

    \b
    rlox bench train ppo                              native and PyTorch path, against what else is installed here
    rlox bench train ppo --steps 50000 --rounds 5
    rlox bench train --peer-python ~/venvs/sb3/bin/python --peer-python ~/venvs/original/bin/python --out benchmarks
    rlox bench train grpo dpo --peer-python ~/venvs/trl/bin/python

    \b
    ppo, a2c   the training call alone
    dqn, sac   the same, of 10,000 steps
    custom     with a policy of one's own, by PyTorch
    solve      tuned PPO until the last 100 episodes average 475
    process    rlox train as a command, against scripts that do the same
    busy       the same with every other core busy, against a loop of one thread
    grpo       GRPO of a small language model that learns to copy a digit, against TRL
    grpo-sum   the same, adding two digits
    grpo-large the same, 2.4 million parameters and 64 completions of 64 tokens
    dpo        DPO on pairs of a right and a wrong sum, against TRL
    """
    with reported("bench"):
        from rlox_cli.bench.train import main

        main(cases or [], steps or [], rounds, peer_python or [], out)


@bench.command(context_settings={**PASS_ON, "allow_interspersed_args": True})
def learn(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="As of `rlox train`.", autocompletion=complete),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each cell.")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of their seeds.")] = 100,
    against: Annotated[
        str | None,
        typer.Option(metavar="sb3|FILE", help="Others to beat: Stable-Baselines3, or an earlier learn.json."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Recorded curves of sb3, CELL-sSEED.json.")
    ] = None,
    peer_python: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="An interpreter that trains sb3, where none are recorded.")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run folders: what is finished there is kept, what was broken off resumed."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that train side by side, each many seeds.")] = 1,
    threshold: Annotated[float | None, typer.Option(help="Return to time; by default the reference's.")] = None,
    margin: Annotated[
        float | None, typer.Option(min=0.0, help="By which others may be better; by default a tenth of their score.")
    ] = None,
    score_only: Annotated[bool, typer.Option("--score-only", help="Leave the fingerprint out.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write learn.json and learn.png there.")] = None,
    imports: Imports = None,
) -> None:
    """Train several seeds and judge: PASS (exit code 0), FAIL (1) or NEED MORE SEEDS (3).

    The score is the interquartile mean (IQM) of the last evaluations, with a stratified 95 % bootstrap interval. It is
    judged by the `reference:` of the tuned settings and against others' runs; where settings have nominal runs, the
    losses, gradients, values and counts of the runs are compared with theirs too, which finds bugs that hardly move
    the score. Beside the verdict: area under the evaluation curve, steps and seconds to the threshold, probability of
    improvement.

    \b
    rlox bench learn algo=ppo env=CartPole-v1
    rlox bench learn algo=ppo env=CartPole-v1 --seeds 40 --jobs 4 --runs outputs/forty
    rlox bench learn algo=ppo,a2c env=CartPole-v1,Acrobot-v1 --against sb3 --reference curves --out benchmarks
    rlox bench learn algo=ppo env=Pendulum-v1 --against sb3 --peer-python ~/venvs/sb3/bin/python

    \b
    a change of one's own, beside what was before:
    rlox bench learn algo=ppo env=Hopper-v5 --seeds 10 --out before
    rlox bench learn algo=ppo env=Hopper-v5 --seeds 10 --against before/learn.json
    """
    with reported("bench"):
        from rlox_cli.bench.learn import main

        code = main(
            [*(overrides or []), *context.args],
            seeds,
            first_seed,
            against,
            reference,
            peer_python or [],
            runs,
            jobs,
            threshold,
            margin,
            score_only,
            json,
            out,
            imports or [],
        )
    raise typer.Exit(code)
