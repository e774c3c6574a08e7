"""The `fastrl` command. torch and transformers are imported inside the commands that need them, never for `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fastrl.errors import EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, FastRLError

if TYPE_CHECKING:
    from fastrl.config import LoadedConfig

app = typer.Typer(
    name="fastrl",
    help="Train language models with reinforcement learning.",
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
    typer.Argument(
        metavar="CONFIG... [section.key=value ...]", help="YAML files, composed left to right, and overrides."
    ),
]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate configuration files from `section.key=value` overrides (a file whose name has `=` exists on disk)."""
    files: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        (overrides if "=" in argument and not os.path.exists(argument) else files).append(argument)
    return files, overrides


def load_arguments(arguments: Sequence[str] | None) -> LoadedConfig:
    """The checked configuration that the arguments of `train` or `eval` describe; warnings go to stderr."""
    from fastrl.config import load_config

    files, overrides = split_arguments(arguments or ())
    if not files:
        raise ConfigError("which configuration? give at least one YAML file, as in `fastrl train configs/ppo.yaml`")
    loaded = load_config(files, overrides)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded


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
        typer.Option(
            metavar="[auto|PATH]",
            help="Continue from a checkpoint or run folder; auto (also without a value) takes the newest.",
        ),
    ] = None,
) -> None:
    """Train a model as CONFIG says."""
    loaded = load_arguments(arguments)
    from fastrl.trainer.loop import run_training

    run_training(loaded, resume=resume, dry_run=dry_run)


def expand_resume(arguments: Sequence[str]) -> list[str]:
    """Give a bare `--resume` its value `auto`: what follows it is a value only if it is `auto` or a folder."""
    result = list(arguments)
    for index, argument in enumerate(result):
        if argument == "--resume":
            following = result[index + 1] if index + 1 < len(result) else ""
            if following == "auto" or os.path.isdir(following):
                continue
            if (
                following
                and not following.startswith("-")
                and "=" not in following
                and not following.endswith((".yaml", ".yml"))
            ):
                continue
            result[index] = "--resume=auto"
    return result


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; deliberate errors become a message without a traceback."""
    try:
        result = app(args=expand_resume(arguments), prog_name="fastrl", standalone_mode=False)
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `python:module:function` rewards are found beside the configuration
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
