"""The verbs of the command line. Each imports what it needs when it runs, so that help and completion are quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.errors import reported
from rlox_cli.streams import open_streams

app = typer.Typer(
    name="rlox",
    help="Train, evaluate and compare reinforcement-learning agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Import this module of your own first; as often as you like."),
]

# Everything after `train` belongs to Hydra's grammar, except -h and --help.
_PASS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def _complete_override(incomplete: str) -> list[str]:
    from rlox_cli.completion import complete

    return complete(incomplete)


@app.command(context_settings=_PASS)
def train(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="What to change.", autocompletion=_complete_override),
    ] = None,
) -> None:
    """Train an agent; -m trains one for every combination of comma-separated values.

    \b
    rlox train algo=ppo env=CartPole-v1
    rlox train env=Pendulum-v1 seed=3 algo.learning_rate=3e-4 env.n_envs=16
    rlox train -m algo=ppo seed=0,1,2,3            rlox train -m 'seed=range(8)' hydra/launcher=joblib
    rlox train -m hydra/sweeper=optuna algo=ppo env=CartPole-v1 'hydra.sweeper.search=\\[learning_rate,gamma]'
    rlox train algo=dqn buffer=prioritized buffer.alpha=0.5
    rlox train env=Acrobot-v1 total_timesteps=200_000 logger=wandb
    rlox train max_time=30m eval.stop_at=475       'logger=\\[mlflow,csv]'
    rlox train init_from=outputs/…/checkpoints/best.safetensors
    rlox train resume=outputs/…                    rlox train resume=outputs/… total_timesteps=500_000
    rlox train experiment=ppo-smoke                rlox train -m experiment=cartpole-seeds
    rlox train --import my_package env=Mine-v0     rlox train algo=sac env=Pendulum-v1 --check

    Tuned settings for (algorithm, environment) are applied where they ship (`rlox ls tuned`) and announced; tuned=off
    turns them off. `rlox show algo=ppo` explains every key. Each run leaves a folder under outputs/ (or
    output_dir=FOLDER) with its configuration, metrics and checkpoints; Ctrl-C stops it with everything saved, a
    second one at once.

    resume=RUN (a run folder, or a checkpoint in one) goes on with a run that was stopped or killed, as if it had not
    been: its own settings hold, and only what is typed beside it changes. A larger total_timesteps extends a run,
    and stretches its schedules to the new end.

    A sweep (-m) tells each job when it ends, tries again what died, and ends with tables and a picture; `rlox sweep
    resume` goes on with one that was stopped or killed. hydra/launcher=joblib runs its jobs beside each other.

    \b
    Flags (all but the first two are Hydra's; all of those: --hydra-help):
      --import MODULE       import a module of your own first: environments, wrappers, algorithms; recorded with the run
      --check               look for what can go wrong, tell what the run will take (time, memory, disk), train nothing
      -m, --multirun        one job per combination of comma-separated values
      --cfg job|hydra|all   print the composed configuration and stop; -p KEY: only that part; --resolve
      --info \\[TOPIC]        how the configuration was composed: all, defaults, defaults-tree, searchpath, plugins
      -cd, --config-dir DIR a folder of your own YAML, laid out like conf/, looked into first (`rlox cp` fills it)
      -cn, --config-name N  another root than config.yaml
    """
    with reported("train"):
        from rlox_cli import train as command

        command.main([*(overrides or []), *context.args])


@app.command(name="eval")
def eval_(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run folder (its best one).")],
    episodes: Annotated[
        int | None, typer.Option(min=1, help="Episodes to play; by default as many as in training.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the environment; by default training's evaluation seed."),
    ] = None,
    stochastic: Annotated[
        bool,
        typer.Option("--stochastic", help="Sample actions, with training's noise, instead of the most likely ones."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    video: Annotated[Path | None, typer.Option(metavar="FILE", help="Film an episode into this .mp4 or .gif.")] = None,
    render: Annotated[bool, typer.Option("--render", help="Show an episode in a window.")] = False,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps at which an episode is cut; by default as in training.")
    ] = None,
    imports: _Imports = None,
) -> None:
    """Evaluate a checkpoint; it needs nothing beside the file.

    Without options this replays the evaluation made in training: on `best` it gives exactly the score that chose it.
    Code of your own that a run used is imported only if you name it again with --import.
    """
    with reported("eval"):
        from rlox_cli.evaluate import main

        main(checkpoint, episodes, seed, stochastic, json, video, render, imports or [], max_steps)


@app.command()
def collect(
    checkpoints: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=]CHECKPOINT", help="Checkpoints, or run folders (the best).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Transitions to gather.")] = None,
    mix: Annotated[
        str | None,
        typer.Option(metavar="NAME:SHARE,…", help="Shares of the steps; the name random: uniformly random actions."),
    ] = None,
    out: Annotated[str, typer.Option(metavar="FILE|minari:ID", help="What to write.")] = "data.arrow",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Decides environments and actions.")] = 0,
    n_envs: Annotated[int, typer.Option(min=1, help="Environments stepped side by side.")] = 8,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The most likely actions, not samples with training's noise.")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Write what this run's saved replay memory holds instead.")
    ] = None,
    env: Annotated[str | None, typer.Option(metavar="ID", help="The environment; by default the checkpoints'.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    imports: _Imports = None,
) -> None:
    """Gather a dataset for offline learning from one or several policies, or from a run's replay memory.

    \b
    rlox collect outputs/…/checkpoints/best.safetensors --steps 100000 --out data/expert.arrow
    rlox collect medium=outputs/… --mix medium:0.5,random:0.5 --steps 100000 --out data/mixed.arrow
    rlox collect --env Pendulum-v1 --steps 10000 --out data/random.npz
    rlox collect --replay outputs/… --out data/medium-replay.arrow
    rlox collect outputs/… --steps 10000 --out minari:pendulum/medium-v0

    Names in --mix are those given as NAME=CHECKPOINT, positions (1, 2, …), or go to the unnamed ones in their order.
    The file's ending says the format: .arrow (which training maps as it is), .npz, .h5 (D4RL's layout), .parquet.
    `rlox show dataset=FILE` tells what one holds. Ctrl-C leaves nothing behind.
    """
    with reported("collect"):
        from rlox_cli.collect import main

        main(checkpoints or [], steps, mix, out, seed, n_envs, deterministic, replay, env, force, imports or [])


@app.command(name="ls")
def ls(
    what: Annotated[str, typer.Argument(help="algos, buffers, envs, experiments, tuned, runs or sweeps.")],
    folder: Annotated[Path, typer.Option(help="Where runs and sweeps lie.")] = Path("outputs"),
    imports: _Imports = None,
) -> None:
    """List algorithms, replay memories, environments, presets, tuned settings, or runs and sweeps made here."""
    with reported("ls"):
        from rlox_cli.imports import import_modules
        from rlox_cli.show import list_things

        import_modules(imports or [])
        list_things(what, folder)


@app.command()
def show(
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC", help="What to explain."),
    ] = None,
    imports: _Imports = None,
) -> None:
    """Explain the keys of a run: type, default, meaning, and the tuned value where algo= and env= are given.

    \b
    rlox show                            the root and all its sections
    rlox show algo=ppo                   the algorithm's hyper-parameters
    rlox show algo=ppo env=CartPole-v1   with the tuned values beside the defaults
    rlox show buffer=prioritized         a replay memory's keys
    rlox show hydra.sweeper              the search by Optuna: rlox train -m hydra/sweeper=optuna
    rlox show dataset=data/medium.arrow  what a dataset holds: rows, episodes, returns, where it comes from
    rlox show eval                       one section: env, buffer, dataset, eval, checkpoint, logger.mlflow,
                                         logger.wandb, logger.tensorboard, logger.csv
    """
    with reported("show"):
        from rlox_cli.imports import import_modules
        from rlox_cli.show import show_keys

        import_modules(imports or [])
        show_keys(topics or [])


@app.command()
def cp(
    name: Annotated[
        str, typer.Argument(help="algo/ppo, tuned/ppo/CartPole-v1, experiment/ppo-smoke, …; conf: everything.")
    ],
    dest: Annotated[Path, typer.Argument(help="The folder to copy into.")] = Path("conf"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Copy configuration that ships into a folder of your own, to edit and use with `rlox train -cd FOLDER`."""
    with reported("cp"):
        from rlox_cli.cp import main

        main(name, dest, force)


@app.command()
def sync(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders; by default all under outputs/.")] = None,
) -> None:
    """Bring the trackers up to date with the runs' own records: after a crash, a dead server, or training offline."""
    with reported("sync"):
        from rlox_cli.sync import main

        main(runs or [])


@app.command(context_settings=_PASS)
def ui(
    context: typer.Context,
    store: Annotated[Path, typer.Option(help="The MLflow database.")] = Path("outputs/mlflow.db"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 5000,
) -> None:
    """Open MLflow's web page over the runs made here; further options go to `mlflow server`."""
    with reported("ui"):
        from rlox_cli.ui import serve

        serve(store, port, context.args)


@app.command()
def plot(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Run folders, or folders that hold such.")],
    metric: Annotated[str, typer.Option(help="What to draw: any name in metrics.jsonl.")] = "eval/mean_return",
    x: Annotated[str, typer.Option(help="steps or time.")] = "steps",
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Group by this setting; `path`: by PATH. As often as you like."),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A name for the runs of each PATH, which are one group.")
    ] = None,
    out: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Write this .png or .html; as often as you like.")
    ] = None,
) -> None:
    """Draw learning curves, performance profiles and speed of runs: a picture, and a page that holds everything.

    Runs that differ in nothing but the seed are one group: the line is the interquartile mean over them, the band its
    95 % bootstrap interval. Without --out both files go into the sweep's folder, or under outputs/plots.

    \b
    rlox plot outputs/sweeps/…                         every combination a group
    rlox plot outputs/sweeps/… --by learning_rate
    rlox plot before after --label old --label new     each PATH a group
    rlox plot outputs --metric mean_reward --x time --out curves.png
    """
    with reported("plot"):
        from rlox_cli.plot import main

        main(paths, metric, x, by or [], label or [], out or [])


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run folder, or a folder that holds runs.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same; what is told is what B has more.")],
    metric: Annotated[str, typer.Option(help="What to compare: any name in metrics.jsonl.")] = "eval/mean_return",
    threshold: Annotated[
        float | None, typer.Option(help="Score whose steps are counted; by default the tuned settings' reference.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two runs, or two groups of runs: settings, versions, scores, and whether B differs from A.

    The verdict needs several seeds on each side: B is better where the 95 % bootstrap interval of the difference of
    interquartile means leaves out zero and a permutation test agrees.

    \b
    rlox compare outputs/sweeps/before outputs/sweeps/after
    rlox compare RUN RUN --threshold 475 --json
    """
    with reported("compare"):
        from rlox_cli.compare import main

        main(a, b, metric, threshold, json)


sweep = typer.Typer(help="See and go on with what `rlox train -m` began.", no_args_is_help=True)
app.add_typer(sweep, name="sweep")


@sweep.command()
def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the sweep.")],
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list of the jobs.")] = False,
) -> None:
    """Show every job of a sweep: what tells it from the others, how far it has come, its scores.

    A job is waiting, running, finished, failed (with why), interrupted (Ctrl-C) or killed; the last three tell the step
    they go on from.
    """
    with reported("sweep"):
        from rlox_cli.sweep.commands import status as show

        show(folder, json)


@sweep.command(context_settings={**_PASS, "allow_interspersed_args": True})
def resume(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the sweep.")],
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try again what failed by its settings or its numbers, too.")
    ] = False,
) -> None:
    """Go on with a sweep that was stopped or killed: finished jobs stay, others go on from their last checkpoints.

    A job without a checkpoint starts anew. Jobs are what they were when the sweep was typed, even if settings that ship
    have changed since. The launcher is the same unless another is typed.

    \b
    rlox sweep resume outputs/sweeps/…
    rlox sweep resume outputs/sweeps/… hydra/launcher=joblib hydra.launcher.n_jobs=4
    rlox sweep resume outputs/sweeps/… --import my_package
    rlox sweep resume outputs/sweeps/… hydra.sweeper.n_trials=50      a search by Optuna, to more trials
    """
    with reported("sweep"):
        from rlox_cli.sweep.commands import resume as go_on

        go_on(folder, context.args, retry_failed)


bench = typer.Typer(help="Measure rlox against its peers on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


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
        typer.Argument(metavar="CASE", help="ppo, a2c, dqn, sac, custom, solve, process, busy; all by default."),
    ] = None,
    steps: Annotated[
        list[int] | None, typer.Option(min=1, help="Environment steps of ppo, a2c and custom. As often as you like.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times the systems take turns; round k has seed k.")] = 3,
    peer_python: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="An interpreter that has Stable-Baselines3 or the original rlox."),
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

    \b
    ppo, a2c   the training call alone
    dqn, sac   the same, of 10,000 steps
    custom     with a policy of one's own, by PyTorch
    solve      tuned PPO until the last 100 episodes average 475
    process    rlox train as a command, against scripts that do the same
    busy       the same with every other core busy, against a loop of one thread
    """
    with reported("bench"):
        from rlox_cli.bench.train import main

        main(cases or [], steps or [100_000], rounds, peer_python or [], out)


@bench.command(context_settings={**_PASS, "allow_interspersed_args": True})
def learn(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="As of `rlox train`.", autocompletion=_complete_override),
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
    imports: _Imports = None,
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


def _version(asked: bool) -> None:
    if asked:
        from rlox import __version__

        print(f"rlox {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Train, evaluate and compare reinforcement-learning agents."""


def main() -> None:
    open_streams()
    if "" in (words := sys.argv[1:]):
        # As a path it would be the folder rlox was started in: often a variable of the shell that is not set.
        print(f"rlox: argument {words.index('') + 1} must not be empty, got ''", file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
