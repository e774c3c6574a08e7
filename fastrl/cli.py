"""The `fastrl` command. torch and transformers are imported inside the commands that need them, never for `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastrl.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, FastRLError

if TYPE_CHECKING:
    from fastrl.config import LoadedConfig

app = typer.Typer(
    name="fastrl",
    help="Train language models with reinforcement learning: PPO, GRPO and their families.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The base of everything typer says about wrong options; newer versions bring their own click, so no import names it.
UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG... [section.key=value", help="YAML files and overrides.", show_default=False),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under runs/.", show_default=False)]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate configuration files from `section.key=value` overrides (a file whose name has `=` exists on disk)."""
    files: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        (overrides if "=" in argument and not os.path.exists(argument) else files).append(argument)
    return files, overrides


def load_arguments(
    arguments: Sequence[str] | None, *, only_look: bool = False, show_warnings: bool = True
) -> LoadedConfig:
    """The checked configuration that the arguments describe; its warnings go to stderr, if nobody else shows them."""
    from fastrl.config import load_config

    files, overrides = split_arguments(arguments or ())
    if not files:
        raise ConfigError("which configuration? give at least one YAML file, as in `fastrl train configs/ppo.yaml`")
    loaded = load_config(files, overrides, only_look=only_look)
    for warning in loaded.warnings if show_warnings else ():
        print(f"warning: {warning}", file=sys.stderr)
    return loaded


def run_folder(name: str) -> Path:
    """The run folder that RUN names: a path, or a name under runs/."""
    from fastrl.config.suggest import closest, did_you_mean

    for folder in (Path(name), Path("runs") / name):
        if folder.is_dir():
            return folder
    known = [entry.name for entry in Path("runs").iterdir() if entry.is_dir()] if Path("runs").is_dir() else []
    raise ConfigError(
        f"{name}: no such run folder, here or under runs/" + did_you_mean(closest(Path(name).name, known))
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        from fastrl import __version__

        print(f"fastrl {__version__}")
        raise typer.Exit


@app.callback()
def fastrl(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models with reinforcement learning: PPO, GRPO and their families."""


@app.command()
def train(
    arguments: Arguments = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan; load no weights.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[auto|PATH]", help="Continue from a checkpoint or run; auto or no value: the newest."),
    ] = None,
) -> None:
    """Train a model as the configuration says.

    CONFIG are YAML files, composed left to right; section.key=value sets single keys, as in
    `fastrl train configs/ppo.yaml optim.lr=1e-5 run.name=first`.
    """
    # A run shows the warnings itself, where they also reach its log.
    loaded = load_arguments(arguments, only_look=dry_run, show_warnings=dry_run)
    from fastrl.run import run_training

    run_training(loaded, resume=resume, dry_run=dry_run)


@app.command(name="eval")
def evaluate(
    arguments: Arguments = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Weights of a checkpoint or of a run; by default those of the argument."),
    ] = None,
) -> None:
    """Score a model on the held-out prompts.

    `fastrl eval runs/first` scores the newest checkpoint of a run on its own held-out prompts, `fastrl eval my.yaml`
    the model that a configuration starts from; section.key=value overrides keys.
    """
    words, runs = [], []
    for word in arguments or ():
        folder = next((f for f in (Path(word), Path("runs") / word) if (f / "config.yaml").is_file()), None)
        words.append(word if folder is None else str(folder / "config.yaml"))
        runs += [] if folder is None else [folder]
    if len(runs) > 1:
        raise ConfigError(f"one run at a time: {', '.join(map(str, runs))}")
    loaded = load_arguments(words, show_warnings=not runs)
    from fastrl.run import run_evaluation

    run_evaluation(loaded, checkpoint=checkpoint or (str(runs[0]) if runs else None))


@app.command()
def doctor() -> None:
    """Check this installation.

    Versions, devices, optional packages, kernels, disk space; exits with 1 when something that is needed is broken.
    """
    from fastrl.report.doctor import run_doctor

    raise typer.Exit(0 if run_doctor() else EXIT_FAILURE)


@app.command()
def config(
    key: Annotated[
        str | None, typer.Option("--explain", metavar="KEY", help="Describe one key or a section: optim.lr, optim.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema, for editors.")] = False,
    docs: Annotated[bool, typer.Option("--docs", help="Print every key as Markdown.")] = False,
    arguments: Arguments = None,
) -> None:
    """Explain keys, or print a whole configuration.

    Without options: print every value that CONFIG files and overrides result in.
    """
    from fastrl.config import explain

    if key is not None:
        print(explain.explain(key))
    elif schema:
        print(explain.json_schema())
    elif docs:
        print(explain.markdown(), end="")
    elif arguments:
        from fastrl.config import dump_config

        print(dump_config(load_arguments(arguments, only_look=True).config), end="")
    else:
        print(explain.overview())


@app.command()
def plot(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or names under runs/.")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Picture to write (.png, .svg, .pdf).")
    ] = None,
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", "-m", metavar="NAME", help="Draw this metric (reward/*: several).")
    ] = None,
) -> None:
    """Draw the training curves of one or several runs."""
    from fastrl.report.plots import plot_runs

    folders = [run_folder(name) for name in runs]
    print(f"wrote {plot_runs(folders, out or folders[0] / 'curves.png', metrics or None)}")


@app.command()
def export(
    run: Run,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="New folder for the model.", show_default=False)],
    dtype: Annotated[
        str | None, typer.Option(metavar="float32|bfloat16|float16", help="Type of the weights; by default as trained.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the trained adapters alone (a run with model.lora_rank).")
    ] = False,
) -> None:
    """Write a run's model as a Hugging Face folder.

    The newest checkpoint of RUN is taken; RUN may also be one of its checkpoints.
    """
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype {dtype}: must be float32, bfloat16 or float16")
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: name a new folder")
    from fastrl.trainer.export import export_run

    print(f"wrote {export_run(run_folder(run), target, dtype=dtype, adapter_only=adapter)}")


@app.command()
def rollouts(
    run: Run,
    step: Annotated[int | None, typer.Option(metavar="N", help="Show this step; the last one by default.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Show at most so many samples.")] = 8,
    sort: Annotated[str, typer.Option(metavar="written|best|worst", help="Which samples come first.")] = "written",
    split: Annotated[str | None, typer.Option(metavar="train|validation", help="Show one of the two only.")] = None,
) -> None:
    """Show what the model wrote: prompt, response, score."""
    from fastrl.report.samples import show_rollouts

    show_rollouts(run_folder(run), step=step, limit=limit, sort=sort, split=split)


def expand_optional_values(arguments: Sequence[str]) -> list[str]:
    """Give a bare `--resume` its value `auto`: an option, a configuration or an override is not its value."""
    result = list(arguments)
    for index, argument in enumerate(result):
        if argument == "--resume":
            following = result[index + 1] if index + 1 < len(result) else ""
            no_value = not following or following.startswith("-") or following.endswith((".yaml", ".yml"))
            if no_value or ("=" in following and not os.path.exists(following)):
                result[index] = "--resume=auto"
    return result


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; deliberate errors become a message without a traceback."""
    try:
        result = app(args=expand_optional_values(arguments), prog_name="fastrl", standalone_mode=False)
        if result == EXIT_INTERRUPTED:  # typer's newer versions catch Ctrl-C themselves
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except FastRLError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except typer.Exit as request:
        return request.exit_code
    except UsageProblem as error:
        error.show()  # type: ignore[attr-defined]
        return EXIT_USAGE
    except BrokenPipeError:
        # The reader has gone (`fastrl config --schema | head`): nothing more can be said, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    # Idle OpenMP threads sleep instead of spinning: beside anything else busy, spinning makes a step many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)  # `python:module:function` rewards are found beside the configuration
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
