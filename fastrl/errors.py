"""Every error that fastrl raises on purpose: a `FastRLError`, the fitting stdlib error too, with an exit code."""

from __future__ import annotations

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class FastRLError(Exception):
    """Base of all deliberate errors. `exit_code` is what the command line returns."""

    exit_code = EXIT_FAILURE


class ConfigError(FastRLError, ValueError):
    """A value in the configuration (or a combination of values) is wrong; the message names the key to change."""

    exit_code = EXIT_USAGE


class DataError(FastRLError, ValueError):
    """A dataset is missing, empty or has the wrong columns."""

    exit_code = EXIT_USAGE


class ModelError(FastRLError, ValueError):
    """A model folder cannot be used: missing files, no tokenizer, an unsupported architecture."""

    exit_code = EXIT_USAGE


class RewardError(FastRLError, RuntimeError):
    """A reward function broke its contract, or too many samples could not be scored."""


class EngineError(FastRLError, RuntimeError):
    """The rollout engine failed and could not be restarted."""


class WeightError(FastRLError, RuntimeError):
    """New weights did not reach the engine whole; the message names the process or the tensor."""


class TrainingError(FastRLError, RuntimeError):
    """Training cannot go on: repeated non-finite updates, no data left to train on."""


class CheckpointError(FastRLError, RuntimeError):
    """A checkpoint is missing, damaged or belongs to another run."""


class ProcessError(FastRLError, RuntimeError):
    """A process of the run ended by an exception or a signal, hung, or never joined."""


class Terminated(FastRLError, RuntimeError):
    """The run was asked to stop (SIGTERM) and did so after a checkpoint."""

    exit_code = EXIT_TERMINATED
