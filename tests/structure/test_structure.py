"""The house keeps its shape: import direction, size, one spelling, documentation, no traces of a machine."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from source_tree import PACKAGE, REPOSITORY, Source, sources

import fastrl
from fastrl.config.leaves import leaves, sections

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
FORBIDDEN_NAMES = {
    "logp", "logps", "logprob", "logprobs", "old_logp", "old_logps", "old_logprob", "old_logprobs", "ref_logp",
    "ref_logps",
    "ref_logprob", "ref_logprobs", "rollout_logp", "rollout_logps", "rollout_logprobs", "cliprange", "cliprange_low",
    "cliprange_high", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "action_mask", "completion_mask",
    "mini_batch_size", "micro_batch_size", "resp_mask", "num_generations",
}  # fmt: skip
ALGORITHM_NAMES = {
    "ppo",
    "grpo",
    "gspo",
    "gmpo",
    "dapo",
    "rloo",
    "cispo",
    "sapo",
    "vespo",
    "topr",
    "remax",
    "opo",
    "gdpo",
}
# Files that speak another project's language at its border.
BORDERS = ("fastrl/rollout/vllm/", "fastrl/kernels/integrations/")


def identifiers(source: Source) -> set[str]:
    """Names that the file defines: variables, parameters, functions, classes, attributes; not the keywords of calls."""
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


@pytest.mark.skipif(importlib.util.find_spec("importlinter") is None, reason="import-linter is not installed")
def test_import_contracts_hold():
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_importing_the_kernels_brings_torch_and_triton_only():
    code = """
import sys
import torch
try:
    import triton
except ImportError:
    pass
before = set(sys.modules)
import fastrl.kernels
for name in fastrl.kernels.__all__:
    getattr(fastrl.kernels, name)
new = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
ours = {name for name in sys.modules if name.startswith("fastrl.")}
print(sorted(new - {"fastrl", "torch", "triton", "torchgen", "numpy", "sympy", "mpmath"}))
print(sorted(name for name in ours if not name.startswith(("fastrl.kernels", "fastrl.errors"))))
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[]", "[]"]


def outside(source: Source, allowed: set[str], rooms: tuple[str, ...]) -> list[str]:
    """Modules that the file imports and may not."""
    found = []
    for module in source.imports():
        top = module.split(".")[0]
        own = top == "fastrl" and any(module == room or module.startswith(f"{room}.") for room in rooms)
        if not own and top not in allowed and top not in sys.stdlib_module_names:
            found.append(f"{source.name} imports {module}")
    return found


def test_kernels_import_torch_and_triton_only():
    rooms = ("fastrl.kernels", "fastrl.errors")
    offenders = [
        line
        for source in sources("kernels")
        if not source.name.startswith(BORDERS)
        for line in outside(source, {"torch", "triton"}, rooms)
    ]
    assert offenders == []


def test_algorithms_are_functions_of_tensors():
    rooms = ("fastrl.kernels", "fastrl.algorithms", "fastrl.errors")
    offenders = [line for source in sources("algorithms") for line in outside(source, {"torch"}, rooms)]
    offenders += [
        f"{source.name} imports {module}"
        for source in sources("algorithms")
        for module in source.imports()
        if module.startswith(("torch.distributed", "logging"))
    ]
    assert offenders == []


def test_one_package_imports_vllm():
    users = [s.name for s in sources() if any(module.split(".")[0] == "vllm" for module in s.imports())]
    assert users and [name for name in users if not name.startswith("fastrl/rollout/vllm/")] == []


def test_triton_is_imported_by_kernel_files_only():
    users = [s.name for s in sources() if any(module.split(".")[0] == "triton" for module in s.imports())]
    assert [name for name in users if not name.startswith("fastrl/kernels/")] == []


def test_every_room_is_a_package():
    """A folder without __init__.py would be left out of the wheel."""
    folders = {source.path.parent for source in sources()}
    assert [str(f.relative_to(REPOSITORY)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_files_are_small():
    sizes = {source.name: len(source.text.splitlines()) for source in sources()}
    assert {name: size for name, size in sizes.items() if size >= MAX_FILE_LINES} == {}


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    documentation = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) else 0  # type: ignore[operator]
    return (function.end_lineno or 0) - function.lineno + 1 - documentation


def test_functions_are_small():
    sizes = {
        f"{source.name}:{function.lineno} {function.name}": lines_of_code(function)
        for source in sources()
        for function in source.functions()
    }
    assert {name: size for name, size in sizes.items() if size >= MAX_FUNCTION_LINES} == {}


def test_one_spelling():
    offenders = {
        source.name: sorted(identifiers(source) & FORBIDDEN_NAMES)
        for source in sources()
        if not source.name.startswith(BORDERS) and identifiers(source) & FORBIDDEN_NAMES
    }
    assert offenders == {}
    keys = {name.split(".")[1] for name in leaves()}
    assert keys & FORBIDDEN_NAMES == set()


def test_kernels_know_no_algorithm_by_name():
    offenders = {
        source.name: sorted(identifiers(source) & ALGORITHM_NAMES)
        for source in sources("kernels")
        if not source.name.startswith(BORDERS) and identifiers(source) & ALGORITHM_NAMES
    }
    assert offenders == {}


def test_every_op_has_its_reference_and_its_test():
    import fastrl.kernels

    tests = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    for folder in sorted(PACKAGE.joinpath("kernels").iterdir()):
        if folder.is_dir() and folder.name in fastrl.kernels.__all__:
            assert (folder / "reference.py").is_file(), f"{folder.name} has no reference.py"
            assert re.search(rf"\b{folder.name}\b", tests), f"{folder.name} has no test"


def imported_names() -> set[str]:
    """Names that some file of the package imports from another one."""
    found: set[str] = set()
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastrl"):
                found |= {alias.name for alias in node.names}
    return found


def undocumented(source: Source, used_elsewhere: set[str]) -> list[str]:
    """Public functions and classes of a module without a docstring: used by other files, or decorated (registered)."""
    return [
        f"{source.name}:{node.lineno} {node.name}"
        for node in source.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and (node.name in used_elsewhere or node.decorator_list)
        and not any(ast.unparse(decorator).endswith("jit") for decorator in node.decorator_list)  # device code
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]


@pytest.mark.parametrize("room", ["kernels", "algorithms", "config"])
def test_public_functions_are_documented(room):
    used = imported_names()
    assert [line for source in sources(room) for line in undocumented(source, used)] == []


def test_every_module_says_what_it_is():
    assert [source.name for source in sources() if source.text.strip() and not ast.get_docstring(source.tree)] == []


def test_every_key_is_described_with_its_unit():
    for name, leaf in leaves().items():
        assert len(leaf.description) >= 10, name
        assert leaf.type_text, name
        if leaf.key.endswith("_s"):
            assert "second" in leaf.description, f"{name} is in seconds"
        if leaf.key.endswith("_tokens"):
            assert "token" in leaf.description, f"{name} counts tokens"
        if leaf.key.endswith("_gib"):
            assert "GiB" in leaf.description, f"{name} is in GiB"
    assert all(sections().values())


def test_the_tree_is_closed_and_two_levels_deep():
    from fastrl.config.schema import Config

    for section, info in Config.model_fields.items():
        model = info.annotation
        assert model.model_config["extra"] == "forbid", section
        assert model.model_config["frozen"], section
        assert not any(hasattr(leaf.annotation, "model_fields") for leaf in model.model_fields.values()), section


def text_files() -> list[Path]:
    """What is part of the project: tracked files where git knows, else everything but environments and caches."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        paths = [REPOSITORY / line for line in listed.stdout.splitlines()]
    else:
        paths = [path for path in REPOSITORY.rglob("*") if not any(part.startswith(".") for part in path.parts)]
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".cfg", ".txt", ".sh", ""}
    return [path for path in paths if path.is_file() and path.suffix in kinds]


def test_no_traces_of_a_machine():
    pattern = re.compile(r"/work/|/opt/|/tmp/w\b|/root/|/home/\w+|\.\./shared")
    offenders = []
    for path in text_files():
        name = path.relative_to(REPOSITORY).as_posix()
        if name.startswith(("tests/", ".ci/")):
            continue  # tests look for optional case files beside the repository
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line):
                offenders.append(f"{name}:{number}: {line.strip()[:100]}")
    assert offenders == []


def test_no_left_overs_and_no_banners():
    left_over = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b|^\s*#\s*[-=#*]{3,}")
    offenders = [
        f"{source.name}:{number}: {line.strip()}"
        for source in sources()
        for number, line in enumerate(source.text.splitlines(), 1)
        if left_over.search(line)
    ]
    assert offenders == []


def test_files_are_read_safely():
    """No eval, no pickle but through an unpickler that names its classes, torch.load only with weights_only=True."""
    offenders = []
    for source in sources():
        offenders += [f"{source.name} imports {m}" for m in source.imports() if m in {"dill", "cloudpickle", "marshal"}]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases):
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                if "find_class" not in methods:
                    offenders.append(f"{source.name}:{node.lineno} an unpickler that builds anything")
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in {"eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler"}:
                offenders.append(f"{source.name}:{node.lineno} calls {called}")
            if called == "torch.load" and options.get("weights_only") != "True":
                offenders.append(f"{source.name}:{node.lineno} torch.load without weights_only=True")
            if called in {"yaml.load", "yaml.full_load", "yaml.unsafe_load"}:
                offenders.append(f"{source.name}:{node.lineno} calls {called}")
    assert offenders == []


def test_version_is_written_once():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == fastrl.__version__


def test_generated_pages_are_up_to_date():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "scripts/gen_docs.py", "--check"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
