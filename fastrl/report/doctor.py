"""`fastrl doctor`: is this installation able to train, and what could be added to it?"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "broken"]
MARKS: dict[State, str] = {"ok": "[green]ok[/]", "note": "[yellow]--[/]", "broken": "[red]broken[/]"}
GIB = 2**30
LITTLE_DISK_GIB = 2.0


@dataclass(frozen=True)
class Check:
    """One line of the report: `broken` means that training would fail."""

    name: str
    state: State
    detail: str


# What fastrl itself cannot do without, and what each extra brings: (what for, module that must import, pip command).
REQUIRED = ("torch", "transformers", "safetensors", "pydantic", "typer", "rich", "yaml", "numpy", "math_verify")
OPTIONAL = (
    ("parquet files", "pyarrow", "pip install 'fastrl[data]'"),
    ("hub datasets", "datasets", "pip install 'fastrl[data]'"),
    ("reasoning-gym tasks", "reasoning_gym", "pip install 'fastrl[reasoning]'"),
    ("plots", "matplotlib", "pip install 'fastrl[plot]'"),
    ("tensorboard", "tensorboard", "pip install 'fastrl[tensorboard]'"),
    ("wandb", "wandb", "pip install 'fastrl[wandb]'"),
    ("swanlab", "swanlab", "pip install 'fastrl[swanlab]'"),
    ("mlflow", "mlflow", "pip install 'fastrl[mlflow]'"),
    ("flash attention (CUDA)", "flash_attn", "pip install flash-attn --no-build-isolation"),
)
# Imported only when asked for; a package that does not fit beside torch (torchvision, say) breaks exactly these.
LAZY_NAMES = {"transformers": ("AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM")}
DISTRIBUTIONS = {"yaml": "PyYAML", "math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}


def version_of(module: str) -> str:
    """The installed version of a module's distribution, or `?` where it does not say."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(module, module))
    except importlib.metadata.PackageNotFoundError:
        return "?"


def required_packages() -> Iterator[Check]:
    """Each needed package is imported, not only looked for: a broken install shows here."""
    for module in REQUIRED:
        try:
            importlib.import_module(module)
            for name in LAZY_NAMES.get(module, ()):
                getattr(sys.modules[module], name)
        except Exception as error:  # a half-installed package can raise anything
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Check(module, "broken", f"{reason}; reinstall: pip install --force-reinstall fastrl")
        else:
            yield Check(module, "ok", version_of(module))


def optional_packages() -> Iterator[Check]:
    """Extras by what they are for, with the command that adds a missing one."""
    for purpose, module, command in OPTIONAL:
        if importlib.util.find_spec(module) is None:
            yield Check(purpose, "note", command)
        else:
            yield Check(purpose, "ok", f"{module} {version_of(module)}")


def machine() -> Iterator[Check]:
    """Python, processors, threads, memory."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("processors", "ok", f"{cores} usable, OMP_NUM_THREADS = {os.environ.get('OMP_NUM_THREADS', 'unset')}")
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
        yield Check("memory", "ok", f"{total:.1f} GiB")


def devices() -> Iterator[Check]:
    """What torch computes on: threads, GPUs with their memory and number types."""
    import torch

    yield Check("torch threads", "ok", f"{torch.get_num_threads()} (run.num_threads sets it)")
    if not torch.cuda.is_available():
        yield Check("GPU", "note", f"none; torch {torch.__version__} runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        room = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        yield Check(f"GPU {index}", "ok", f"{properties.name}, {room}, compute {properties.major}.{properties.minor}")


def number_types() -> Iterator[Check]:
    """A small product in each type that run.dtype can name."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        try:
            ones = torch.ones(4, 4, dtype=dtype, device=device)
            right = bool((ones @ ones == 4).all())
        except RuntimeError as error:
            yield Check(name, "broken", f"on {device}: {str(error).splitlines()[0]}")
        else:
            yield Check(name, "ok" if right else "broken", f"on {device}" + ("" if right else ": wrong product"))


def kernels() -> Iterator[Check]:
    """Two kernels on hand-worked numbers, on the device that training would take."""
    import torch

    from fastrl.kernels import group_normalize, log_prob

    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1000.0]], device=device)
    labels = torch.tensor([1, 3], device=device)
    found = log_prob(logits, labels).log_prob.cpu()
    good = torch.allclose(found, torch.tensor([-1.3862944, 0.0]), atol=1e-6)
    yield Check("kernel log_prob", "ok" if good else "broken", f"on {device}" + ("" if good else f": {found.tolist()}"))
    scores, group = torch.tensor([0.0, 1.0, 5.0], device=device), torch.tensor([0, 0, 1], device=device)
    found = group_normalize(scores, group).cpu()
    good = torch.allclose(found, torch.tensor([-0.7071058, 0.7071058, 0.0]), atol=1e-5)
    detail = f"on {device}" + ("" if good else f": {found.tolist()}")
    yield Check("kernel group_normalize", "ok" if good else "broken", detail)


def disk() -> Iterator[Check]:
    """Room for checkpoints where runs are written."""
    free = shutil.disk_usage(".").free / GIB
    state: State = "ok" if free >= LITTLE_DISK_GIB else "note"
    yield Check("disk", state, f"{free:.1f} GiB free in {os.getcwd()}")


SECTIONS: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
    ("machine", machine),
    ("packages", required_packages),
    ("devices", devices),
    ("number types", number_types),
    ("kernels", kernels),
    ("extras", optional_packages),
    ("disk", disk),
)


def examine() -> list[tuple[str, list[Check]]]:
    """All checks by section; one that raises is a broken line, the others still run."""
    report = []
    for title, checks in SECTIONS:
        found: list[Check] = []
        try:
            found.extend(checks())
        except Exception as error:  # the doctor's work is to report whatever goes wrong
            reason = (str(error).splitlines() or [""])[0]
            found.append(Check(title, "broken", f"{type(error).__name__}: {reason}"))
        report.append((title, found))
    return report


def run_doctor() -> bool:
    """Print the report as one table; True when nothing that training needs is broken."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fastrl import __version__

    report = examine()
    table = Table(
        title=f"fastrl {__version__}", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    for title, checks in report:
        for index, check in enumerate(checks):
            section = f"[bold]{title}[/]" if index == 0 else ""
            table.add_row(section, check.name, MARKS[check.state], escape(check.detail))
    console = Console()
    console.print(table)
    broken = [check.name for _, checks in report for check in checks if check.state == "broken"]
    console.print(f"broken: {', '.join(broken)}" if broken else "everything that training needs works")
    return not broken
