"""One command's work from a checked configuration: train, resume, evaluate. This is where trainer and report meet."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrl.config.load import LoadedConfig, dump_config
from fastrl.config.schema import Config
from fastrl.dist.checkpoint import CheckpointManager, load_checkpoint
from fastrl.dist.collectives import rank
from fastrl.errors import FastRLError
from fastrl.report.run_logger import RunLogger
from fastrl.rollout.records import RolloutWriter
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.plan import describe
from fastrl.trainer.run_folder import new_run_folder, resumed_run_folder

if TYPE_CHECKING:
    from fastrl.trainer.loop import Parts, Trainer


def run_training(loaded: LoadedConfig, *, resume: str | None = None, dry_run: bool = False) -> Path | None:
    """Train as the configuration says; returns the run folder.

    Args:
        loaded: the checked configuration.
        resume: None starts a new run; "auto" or a folder continues one.
        dry_run: print the plan and what would be loaded, load no weights, write nothing.
    """
    config = loaded.config
    if dry_run:
        print("\n".join([*describe(config), "", *dry_run_lines(config)]))
        return None
    checkpoint: Path | None = None
    if resume is None:
        folder = new_run_folder(config, loaded.files)
    else:
        folder, checkpoint = resumed_run_folder(config, loaded.files, resume)
    manager = CheckpointManager(
        folder / "checkpoints", keep_last=config.run.keep_last_checkpoints, keep_best=config.run.keep_best_checkpoint
    )
    saved = None if resume is None else peek(checkpoint or folder)
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    with (
        leaving_nothing(folder, fresh=resume is None),
        RunLogger(
            folder,
            console=config.logging.console,
            trackers=config.logging.trackers,
            project=config.logging.project,
            config=config.model_dump(mode="json"),
            resumed_step=None if saved is None else saved["step"],
            saved=None if saved is None else saved["logger"],
            is_main=rank() == 0,
        ) as logger,
    ):
        for warning in loaded.warnings:
            logger.warning(warning)
        train(config, logger, manager, folder, None if saved is None else str(checkpoint or folder))
    return folder


@contextmanager
def leaving_nothing(folder: Path, *, fresh: bool) -> Iterator[None]:
    """Removes the folder of a new run that ended with a deliberate error before it had anything to show."""
    try:
        yield
    except FastRLError:
        empty = (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size == 0
        if fresh and rank() == 0 and empty:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def train(config: Config, logger: RunLogger, manager: CheckpointManager, folder: Path, resume_from: str | None) -> None:
    """Build the parts, restore them if asked, and run the loop to its end."""
    from transformers.utils.logging import disable_progress_bar

    from fastrl.trainer.loop import Trainer
    from fastrl.trainer.setup import build
    from fastrl.trainer.state import restore, save

    disable_progress_bar()
    logger.phase("loading")
    metrics = Metrics(on_phase=logger.phase)
    parts = build(config, progress=logger.progress, metrics=metrics)
    with closing(parts):
        logger.total_steps = parts.total_steps
        writer = None
        if config.logging.rollouts_every_steps and rank() == 0:
            writer = RolloutWriter(folder / "rollouts", max_samples=config.logging.rollouts_max_samples)

        def checkpoint(score: float | None) -> None:
            save(trainer, manager, {"logger": logger.state_dict()}, score)
            logger.info(f"saved step {trainer.step_number} in {manager.folder}")

        trainer = Trainer(parts, logger, writer, checkpoint)
        logger.plan([*describe(config), *part_lines(parts)])
        if resume_from is not None:
            restore(trainer, manager, resume_from)
            logger.info(f"resumed at step {trainer.step_number} from {resume_from}")
        interruptible(trainer, logger)


def interruptible(trainer: Trainer, logger: RunLogger) -> None:
    """Run the loop; on Ctrl-C say where the run stands and how it goes on."""
    try:
        trainer.fit()
    except KeyboardInterrupt:
        step, again = trainer.step_number + 1, f"fastrl train ... --resume {logger.folder}"
        logger.info(f"interrupted in step {step}; `{again}` continues from the last checkpoint")
        raise


def run_evaluation(loaded: LoadedConfig, *, checkpoint: str | Path | None = None) -> dict[str, float]:
    """Score the held-out prompts with the configured model, or a checkpoint of it; prints and returns the figures."""
    from fastrl.errors import ConfigError
    from fastrl.trainer.setup import build
    from fastrl.trainer.state import restore_weights

    if loaded.config.data.validation is None:
        raise ConfigError("data.validation = null: evaluation needs held-out prompts, e.g. data.validation=test.jsonl")
    metrics = Metrics()
    parts = build(loaded.config, metrics=metrics)
    with closing(parts):
        if checkpoint is not None:
            restore_weights(parts, str(checkpoint))
        assert parts.validator is not None
        parts.validator.run(metrics)
        values = metrics.reduce()
    if rank() == 0:
        for name, value in sorted(values.items()):
            if name.startswith("val/"):
                print(f"{name} {value:.6g}")
    return values


@contextmanager
def closing(parts: Parts) -> Any:
    """Ends reward workers and the engine, whatever happens inside."""
    try:
        yield parts
    finally:
        parts.generator.rewards.close()
        parts.engine.close()


def peek(path: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint, without its tensors."""
    return load_checkpoint(path, {})[1]


def part_lines(parts: Parts) -> list[str]:
    """What was loaded, in words."""
    policy, run = parts.actor.model, parts.config.run
    size = sum(p.numel() for p in policy.parameters()) / 1e6
    held_out = len(parts.validator.prompts) if parts.validator else 0
    dropped = parts.num_overlong_prompts
    too_long = f", {dropped} longer than data.max_prompt_tokens dropped" if dropped else ""
    return [
        f"model         {type(policy).__name__}, {size:.1f}M parameters, {run.dtype} on {parts.device}",
        f"data          {len(parts.cursor.prompt_set)} training prompts, {held_out} held out{too_long}",
        f"roles         {', '.join(sorted(role.value for role in parts.plan.roles))}",
        f"threads       {thread_count()}; {parts.total_steps} steps",
    ]


def thread_count() -> str:
    """CPU threads torch uses."""
    import torch

    return f"{torch.get_num_threads()} of {os.cpu_count()} cores"


def dry_run_lines(config: Config) -> list[str]:
    """What a run would load and write."""
    o, held_out = config.optim, config.data.validation
    return [
        f"model         {config.model.path}",
        f"data          {config.data.train}" + (f", held out {held_out}" if held_out else ""),
        f"length        {f'{o.total_epochs} epochs' if o.total_steps is None else f'{o.total_steps} steps'}",
        f"run folder    {config.run.dir}/{config.run.name or '<config>-<time>'}",
        "dry run: nothing was loaded or written",
    ]
