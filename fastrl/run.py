"""One command's work from a checked configuration: train, resume, evaluate. This is where trainer and report meet."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrl.config.load import LoadedConfig, dump_config
from fastrl.config.schema import Config
from fastrl.dist.checkpoint import CheckpointManager, find_checkpoint, load_checkpoint
from fastrl.dist.collectives import on_rank_zero, rank, world_size
from fastrl.dist.failure import Whereabouts, reporting
from fastrl.dist.mesh import mesh_shape, place, process_group
from fastrl.errors import EXIT_FAILURE, EXIT_INTERRUPTED, FastRLError, Terminated, TrainingError
from fastrl.report.run_logger import RunLogger
from fastrl.rollout.records import RolloutWriter
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.plan import describe
from fastrl.trainer.precision import resolve_device
from fastrl.trainer.run_folder import (
    changed_keys,
    leaving_nothing,
    new_run_folder,
    resumed_run_folder,
    sole_user,
    unreadable_checkpoints,
    writable,
)

if TYPE_CHECKING:
    from fastrl.trainer.loop import Parts, Trainer


def run_training(loaded: LoadedConfig, *, resume: str | None = None, dry_run: bool = False) -> Path | None:
    """Train as the configuration says, with as many processes as it says; returns the run folder.

    A process that a launcher started (`fastrl train` itself, torchrun) is one rank of the run.

    Args:
        loaded: the checked configuration.
        resume: None starts a new run; "auto" or a folder continues one.
        dry_run: print the plan and what would be loaded, load no weights, write nothing.
    """
    config = loaded.config
    if dry_run:
        goes_on = [] if resume is None else [f"resumes       {checkpoint_meant(config, loaded.files, resume)}"]
        print("\n".join([*describe(config), "", *goes_on, *dry_run_lines(config)]))
        return None
    if place() is None and (number := number_of_processes(config)) > 1:
        return start_ranks(loaded, resume, number)
    with process_group(resolve_device(config.run.device), config.parallel.timeout_s) as store:
        whereabouts = Whereabouts(store, rank(), world_size())
        with reporting(whereabouts):
            return run_rank(loaded, resume, whereabouts)


def number_of_processes(config: Config) -> int:
    """Ranks to start on this machine: parallel.processes, or one per visible GPU."""
    import torch

    if config.parallel.processes is not None:
        return config.parallel.processes
    return max(1, torch.cuda.device_count()) if config.run.device in ("auto", "cuda") else 1


def start_ranks(loaded: LoadedConfig, resume: str | None, number: int) -> Path:
    """Start this run as `number` ranks, wait for them, and return its folder."""
    from fastrl.dist.launch import SHOW_STACK, launch

    config = loaded.config
    mesh_shape(number, config.parallel.replicate, config.parallel.shard)
    given = {
        "config": config.model_dump(mode="json"),
        "files": loaded.files,
        "warnings": loaded.warnings,
        "resume": resume,
        "sys_path": sys.path,
    }
    with tempfile.TemporaryDirectory(prefix="fastrl-") as folder:
        spec = Path(folder) / "run.json"
        spec.write_text(json.dumps(given), encoding="utf-8")
        command = [sys.executable, "-c", SHOW_STACK + BOOT, str(spec)]
        store = launch(command, number, timeout_s=config.parallel.timeout_s)
    return Path(store.get(FOLDER_KEY).decode())


FOLDER_KEY = "folder"
BOOT = (
    "import json, sys; given = json.load(open(sys.argv[1])); sys.path[:] = given['sys_path']; "
    "from fastrl.run import rank_main; sys.exit(rank_main(given))"
)


def rank_main(given: dict[str, Any]) -> int:
    """One rank that `start_ranks` started; returns its exit code. The launcher shows what ended it."""
    from fastrl.dist.launch import die_with_launcher

    die_with_launcher()
    config = Config.model_validate(given["config"])
    loaded = LoadedConfig(config, {}, tuple(given["files"]), tuple(given["warnings"]))
    try:
        run_training(loaded, resume=given["resume"])
    except FastRLError as error:
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        return EXIT_FAILURE
    return 0


def run_rank(loaded: LoadedConfig, resume: str | None, whereabouts: Whereabouts) -> Path:
    """This process's part of a run, which is all of it where it is the only one."""
    config = loaded.config
    parallel = config.parallel
    mesh_shape(world_size(), parallel.replicate, parallel.shard)
    checkpoint: Path | None = None
    if resume is None:
        folder = on_rank_zero(lambda: new_run_folder(config, loaded.files))
    else:
        folder, checkpoint = on_rank_zero(lambda: resumed_run_folder(config, loaded.files, resume))
    if whereabouts.store is not None:
        whereabouts.store.set(FOLDER_KEY, str(folder))
    manager = CheckpointManager(
        folder / "checkpoints", keep_last=config.run.keep_last_checkpoints, keep_best=config.run.keep_best_checkpoint
    )
    saved = None if resume is None else peek(checkpoint or folder)
    with (
        sole_user(folder),
        leaving_nothing(folder, fresh=resume is None),
        writable(folder),
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
        if rank() == 0:
            start_log(logger, loaded, resumed_newest=resume is not None and checkpoint is None)
        train(config, logger, manager, whereabouts, None if saved is None else str(checkpoint or folder))
    return folder


def start_log(logger: RunLogger, loaded: LoadedConfig, *, resumed_newest: bool) -> None:
    """What somebody should know before the first step; config.yaml is written once the changes to it are told."""
    config, folder = loaded.config, logger.folder
    if changes := changed_keys(folder / "config.yaml", config):
        logger.info(f"changed since the last start: {', '.join(changes)}")
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    for warning in loaded.warnings:
        logger.warning(warning)
    for path in unreadable_checkpoints(folder) if resumed_newest else ():
        logger.warning(f"{path} is damaged (its manifest cannot be read) and was passed over")
    if world_size() > config.rollout.num_prompts_per_step:
        logger.info(
            f"rollout.num_prompts_per_step = {config.rollout.num_prompts_per_step} is less than the "
            f"{world_size()} processes: some generate nothing and take part in the rest"
        )


def train(
    config: Config,
    logger: RunLogger,
    manager: CheckpointManager,
    whereabouts: Whereabouts,
    resume_from: str | None,
) -> None:
    """Build the parts, restore them if asked, and run the loop to its end."""
    from transformers.utils.logging import disable_progress_bar

    from fastrl.trainer.loop import Trainer
    from fastrl.trainer.setup import build
    from fastrl.trainer.state import restore, save

    disable_progress_bar()
    trainer: Trainer | None = None

    def on_phase(name: str) -> None:
        logger.phase(name)
        whereabouts.enter(name, 0 if trainer is None else trainer.step_number + 1)

    on_phase("loading")
    metrics = Metrics(on_phase=on_phase)
    parts = build(config, progress=logger.progress, metrics=metrics)
    with closing(parts):
        logger.total_steps = parts.total_steps
        writer = None
        if config.logging.rollouts_every_steps and rank() == 0:
            writer = RolloutWriter(logger.folder / "rollouts", max_samples=config.logging.rollouts_max_samples)

        def checkpoint(score: float | None) -> None:
            assert trainer is not None
            later = config.run.async_checkpoint
            save(trainer, manager, {"logger": logger.state_dict()}, score, later=later)
            logger.info(f"{'saving' if later else 'saved'} step {trainer.step_number} in {manager.folder}")

        stop = StopRequest()
        trainer = Trainer(parts, logger, writer, checkpoint, stop)
        logger.plan([*describe(config), *part_lines(parts)])
        if resume_from is not None:
            restore(trainer, manager, resume_from)
            logger.info(f"resumed at step {trainer.step_number} from {resume_from}")
            if trainer.step_number >= parts.total_steps:
                logger.warning(f"nothing left to do: optim.total_steps says {parts.total_steps}; raise it to go on")
        with stop:
            try:
                interruptible(trainer, logger, whereabouts)
            except Terminated:
                manager.finish()
                raise
            manager.finish()


def interruptible(trainer: Trainer, logger: RunLogger, whereabouts: Whereabouts) -> None:
    """Run the loop; on Ctrl-C say where the run stands and how it goes on, out of memory what to set."""
    from torch import OutOfMemoryError

    try:
        trainer.fit()
    except OutOfMemoryError as error:
        raise out_of_memory(error, whereabouts.status.phase, trainer) from error
    except KeyboardInterrupt:
        step, again = trainer.step_number + 1, f"fastrl train ... --resume {logger.folder}"
        logger.info(f"interrupted in step {step}; `{again}` continues from the last checkpoint")
        raise


def out_of_memory(error: Exception, phase: str, trainer: Trainer) -> FastRLError:
    """The message of a device that is full: which phase, and which key to set to what."""
    run, said = trainer.config.run, str(error).partition("\n")[0]
    where = f"{phase}, step {trainer.step_number + 1}: {said}"
    if phase in ("generate", "validate"):
        return TrainingError(f"out of memory in {where}. Set rollout.kv_budget_tokens to bound the key/value cache")
    largest = min(trainer.largest_microbatch, run.max_tokens_per_microbatch) or run.max_tokens_per_microbatch
    return TrainingError(
        f"out of memory in {where}. Set run.max_tokens_per_microbatch={max(1, largest // 2)} (it is "
        f"{run.max_tokens_per_microbatch}, the largest micro-batch had {trainer.largest_microbatch} tokens), or "
        "model.gradient_checkpointing=true"
    )


class StopRequest:
    """Remembers that SIGTERM came, while the block runs; the loop looks at it after every step."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: object) -> None:
        self.asked = True


def run_evaluation(loaded: LoadedConfig, *, checkpoint: str | Path | None = None) -> dict[str, float]:
    """Score the held-out prompts with the configured model, or a checkpoint of it; prints and returns the figures."""
    from transformers.utils.logging import disable_progress_bar

    from fastrl.errors import ConfigError
    from fastrl.trainer.setup import build
    from fastrl.trainer.state import restore_weights

    disable_progress_bar()
    if loaded.config.data.validation is None:
        raise ConfigError("data.validation = null: evaluation needs held-out prompts, e.g. data.validation=test.jsonl")
    metrics = Metrics()
    parts = build(loaded.config, metrics=metrics)
    with closing(parts):
        if checkpoint is not None:
            restore_weights(parts, str(checkpoint))
        assert parts.validator is not None
        parts.memory.open(parts.actor.model, 0)
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
    from fastrl.trainer.engines import engine_lines

    policy, run = parts.actor.model, parts.config.run
    size = sum(p.numel() for p in policy.parameters()) / 1e6
    name = type(policy).__name__.removeprefix("FSDP")
    held_out = len(parts.validator.prompts) if parts.validator else 0
    dropped = parts.num_overlong_prompts
    too_long = f", {dropped} longer than data.max_prompt_tokens dropped" if dropped else ""
    return [
        f"model         {name}, {size:.1f}M parameters, {run.dtype} on {parts.device}",
        f"kernels       {kernel_line(parts)}",
        f"data          {len(parts.cursor.prompt_set)} training prompts, {held_out} held out{too_long}",
        f"roles         {', '.join(sorted(role.value for role in parts.plan.roles))}",
        *engine_lines(parts),
        f"processes     {world_size()}, {thread_count()} threads each; {parts.total_steps} steps",
    ]


def kernel_line(parts: Parts) -> str:
    """Which implementations the passes of the policy use."""
    from fastrl.models.liger import why_not_liger
    from fastrl.models.training_layout import NAMES, choose_attention
    from fastrl.trainer.precision import compute_dtype

    model, wanted = parts.actor.model, parts.config.model
    dtype = compute_dtype(parts.config.run.dtype)
    patched = getattr(model, "fastrl_liger", None)
    if patched:
        liger = f"on ({', '.join(patched)})"
    elif wanted.liger == "off":
        liger = "off (model.liger = off)"
    else:
        liger = f"off ({why_not_liger(model.config.model_type, parts.device, dtype)})"
    return f"attention: {NAMES[choose_attention(parts.device, dtype, wanted.attention)]}; Liger: {liger}"


def thread_count() -> str:
    """CPU threads torch uses."""
    import torch

    return f"{torch.get_num_threads()} of {os.cpu_count()} cores"


def checkpoint_meant(config: Config, files: tuple[str, ...], resume: str) -> Path:
    """The checkpoint that `--resume` would go on from; CheckpointError when there is none."""
    return find_checkpoint(resumed_run_folder(config, files, "auto")[0] if resume == "auto" else resume)


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
