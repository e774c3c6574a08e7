"""Rules about prompts, models on disk and reward functions: what a configuration names must be there."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from fastrl.config.findings import Finding, Rule, Subject, error, no_effect, warning
from fastrl.config.suggest import closest, did_you_mean
from fastrl.errors import DataError

FILE_KINDS = (".jsonl", ".parquet", ".csv")
BUILTIN_MODELS = ("builtin:tiny",)
TOKENIZER_FILES = {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"}
BUILTIN_REWARDS = ("exact", "math", "reasoning_gym", "regex")


def _as_list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def prompt_sources(subject: Subject) -> Iterator[Finding]:
    """Files exist and are of a known kind, task and hub names are well formed, their packages are installed."""
    data = subject.config.data
    for key, names in (("data.train", _as_list(data.train)), ("data.validation", _as_list(data.validation))):
        for index, name in enumerate(names):
            in_list = not isinstance(getattr(data, key.split(".")[1]), str)
            yield from _prompt_source(f"{key}[{index}]" if in_list else key, name, subject)
        options = f"{key}_options"
        if (
            names
            and getattr(data, options.split(".")[1])
            and not any(name.startswith(("task:", "hub:")) for name in names)
        ):
            yield no_effect(options, f"{key} = {names[0]} is a file")
    if data.train == [] or data.validation == []:
        key = "data.train" if data.train == [] else "data.validation"
        yield error(key, text=f"{key} = []: name at least one source" + (", or null" if key != "data.train" else ""))
    same = set(_as_list(data.train)) & {name for name in _as_list(data.validation) if not name.startswith("task:")}
    if same and not data.validation_options:
        text = f"data.validation = {min(same)} is also in data.train: its score will not tell about new prompts"
        yield warning("data.validation", "data.train", text=text)


def _prompt_source(key: str, name: str, subject: Subject) -> Iterator[Finding]:
    if name.startswith("task:"):
        if not name.startswith("task:reasoning_gym/"):
            yield from _task_problem(key, name, subject)
        elif importlib.util.find_spec("reasoning_gym") is None:
            text = f"{key} = {name}: reasoning-gym is not installed: pip install 'fastrl[reasoning]'"
            yield Finding((key,), text, "missing_package")
        return
    if name.startswith("hub:"):
        if importlib.util.find_spec("datasets") is None:
            text = f"{key} = {name}: datasets is not installed: pip install 'fastrl[data]'"
            yield Finding((key,), text, "missing_package")
        return
    path = Path(name).expanduser()
    if path.suffix not in FILE_KINDS:
        hint = f"; a task is written task:{name}" if re.fullmatch(r"\w+", name) else ""
        text = f"{key} = {name}: a source is a file ({', '.join(FILE_KINDS)}), task:NAME or hub:NAME{hint}"
        yield error(key, text=text)
    elif path.is_dir():
        yield error(key, text=f"{key} = {name}: is a folder; give a file in it")
    elif not path.is_file():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = [str(path.parent / match) for match in closest(path.name, siblings)]
        yield error(key, text=f"{key} = {name}: no such file" + (did_you_mean(near) or f" (looked from {Path.cwd()})"))
    elif path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        text = f"{key} = {name}: reading parquet needs pyarrow: pip install 'fastrl[data]'"
        yield Finding((key,), text, "missing_package")


def _task_problem(key: str, name: str, subject: Subject) -> Iterator[Finding]:
    """Make one problem: an unknown task, option or value says so."""
    from fastrl.data.tasks import task_rows

    data = subject.config.data
    split = "validation" if key.startswith("data.validation") else "train"
    options = {**data.train_options, **(data.validation_options if split == "validation" else {})}
    try:
        next(iter(task_rows(name.removeprefix("task:"), split=split, options=options)), None)
    except (DataError, TypeError) as problem:
        yield error(key, f"data.{split}_options", "data.train_options", text=f"{key} = {problem}")


def prompt_rendering(subject: Subject) -> Iterator[Finding]:
    """A prompt template has a place for the prompt, a chat template file exists."""
    config = subject.config
    if config.data.prompt_template is not None and "{prompt}" not in config.data.prompt_template:
        yield error("data.prompt_template", text="data.prompt_template has no `{prompt}` in it")
    if config.model.chat_template is not None and not Path(config.model.chat_template).expanduser().is_file():
        yield error("model.chat_template", text=f"model.chat_template = {config.model.chat_template}: no such file")


def model_folders(subject: Subject) -> Iterator[Finding]:
    """What is written like a path is a folder that exists; built-in names are known."""
    config = subject.config
    for key, name in (
        ("model.path", config.model.path),
        ("model.tokenizer_path", config.model.tokenizer_path),
        ("critic.path", config.critic.path),
    ):
        if name is None:
            continue
        if name.startswith("builtin:"):
            if name not in BUILTIN_MODELS:
                yield error(key, text=f"{key} = {name}: the built-in models are {', '.join(BUILTIN_MODELS)}")
        elif Path(name).expanduser().is_dir():
            yield from _folder_problem(key, name, subject)
        elif re.match(r"[./~]|\w:\\", name) or name.count("/") > 1:
            path = Path(name).expanduser()
            siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            near = [str(path.parent / match) for match in closest(path.name, siblings)]
            yield error(key, text=f"{key} = {name}: no such folder" + did_you_mean(near))


def _folder_problem(key: str, name: str, subject: Subject) -> Iterator[Finding]:
    """A folder holds a model and, unless it is looked for elsewhere, a tokenizer."""
    files = {entry.name for entry in Path(name).expanduser().iterdir()}
    if key != "model.tokenizer_path" and "config.json" not in files:
        yield error(key, text=f"{key} = {name}: no Hugging Face model folder, it has no config.json")
    own = key == "model.tokenizer_path" or (key == "model.path" and subject.config.model.tokenizer_path is None)
    if own and not files & TOKENIZER_FILES:
        text = f"{key} = {name} has no tokenizer (none of {', '.join(sorted(TOKENIZER_FILES))})"
        yield error(key, "model.tokenizer_path", text=f"{text}: set model.tokenizer_path to a folder that has one")


def reward_functions(subject: Subject) -> Iterator[Finding]:
    """Names are known, Python functions can be imported."""
    for index, name in enumerate(subject.config.reward.functions):
        key = f"reward.functions[{index}]"
        if name.startswith("python:"):
            if problem := _python_problem(name.removeprefix("python:")):
                yield error(key, text=f"{key} = {name}: {problem}")
        elif name.startswith("model:"):
            yield from _reward_model(subject, key, name.removeprefix("model:"))
        elif name == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
            text = f"{key} = {name}: reasoning-gym is not installed: pip install 'fastrl[reasoning]'"
            yield Finding((key,), text, "missing_package")
        elif name not in BUILTIN_REWARDS:
            near = did_you_mean(closest(name, BUILTIN_REWARDS))
            known = f"; known are {', '.join(BUILTIN_REWARDS)}, python:package.module:function and model:PATH"
            kind, colon, rest = name.partition(":")
            kinds = closest(kind, ("python", "model")) if colon else []
            meant = f"{kinds[0]}:{rest}" if kinds else f"python:{name}"
            hint = f"; did you mean {meant}?" if ":" in name or "." in name else near or known
            yield error(key, text=f"{key} = {name}: unknown reward function{hint}")


def _reward_model(subject: Subject, key: str, path: str) -> Iterator[Finding]:
    """A reward model's folder is there and has a tokenizer; one row goes to one score."""
    folder = Path(path).expanduser()
    if not path:
        yield error(key, text=f"{key} = model: names no model; write model:FOLDER or model:HUB/NAME")
    elif not folder.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        yield error(key, text=f"{key} = model:{path}: no such folder; write model:FOLDER or model:HUB/NAME")
    elif not folder.is_dir():
        if folder.is_file() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
            yield error(key, text=f"{key} = model:{path}: neither a folder nor a hub name; write model:FOLDER")
    elif not (folder / "config.json").is_file():
        yield error(key, text=f"{key} = model:{path}: no Hugging Face model folder, it has no config.json")
    elif not {f.name for f in folder.iterdir()} & TOKENIZER_FILES:
        text = f"{key} = model:{path} has no tokenizer (none of {', '.join(sorted(TOKENIZER_FILES))})"
        yield error(key, text=f"{text}: save the reward model's own beside it")


def _python_problem(path: str) -> str | None:
    """Why `package.module:function` cannot be had, or None."""
    module_name, colon, function_name = path.partition(":")
    if not colon or not module_name or not function_name:
        return "write python:package.module:function"
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        missing = problem.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            return f"there is no module {module_name} (looked in the current folder and among the installed packages)"
        return f"importing {module_name} failed: {problem}"
    except Exception as problem:  # user code may raise anything; all of it is the user's to see
        return f"importing {module_name} failed: {type(problem).__name__}: {problem}"
    for part in function_name.split("."):
        if not hasattr(found, part):
            near = closest(part, [name for name in dir(found) if not name.startswith("_")])
            return f"module {module_name} has no {function_name}" + did_you_mean(near)
        found = getattr(found, part)
    if not callable(found):
        return f"{function_name} in {module_name} is not a function"
    if inspect.isclass(found):
        return None  # made and called where it scores
    from fastrl.rewards.signatures import read_signature

    try:
        read_signature(path, found)
    except (TypeError, ValueError) as problem:
        return str(problem).removeprefix(f"{path}: ").removeprefix(f"{path} ")
    return None


def reward_settings(subject: Subject) -> Iterator[Finding]:
    """Weights match functions, patterns compile and are used, bounds are in order."""
    reward = subject.config.reward
    if reward.weights is not None and len(reward.weights) != len(reward.functions):
        yield error(
            "reward.weights",
            "reward.functions",
            text=f"reward.weights has {len(reward.weights)} of the {len(reward.functions)} weights that "
            "reward.functions needs, one each",
        )
    if "regex" in reward.functions and reward.regex_pattern is None:
        text = "reward.functions has regex, but reward.regex_pattern is not set"
        yield error("reward.regex_pattern", "reward.functions", text=text)
    for key, pattern, function in (
        ("reward.regex_pattern", reward.regex_pattern, "regex"),
        ("reward.answer_pattern", reward.answer_pattern, "exact"),
    ):
        if pattern is None:
            continue
        try:
            re.compile(pattern)
        except re.error as problem:
            yield error(key, text=f"{key} = {pattern!r} is no regular expression: {problem}")
        if function not in reward.functions:
            yield no_effect(key, f"reward.functions has no {function}")
    if reward.model_max_tokens is not None and not any(f.startswith("model:") for f in reward.functions):
        yield no_effect("reward.model_max_tokens", "reward.functions has no model:PATH")
    if reward.clip_min is not None and reward.clip_max is not None and reward.clip_min >= reward.clip_max:
        text = f"reward.clip_min = {reward.clip_min:g} is not below reward.clip_max = {reward.clip_max:g}"
        yield error("reward.clip_min", "reward.clip_max", text=text)
    longest = subject.config.rollout.max_response_tokens
    if reward.overlong_buffer_tokens > longest:
        yield error(
            "reward.overlong_buffer_tokens",
            "rollout.max_response_tokens",
            text=f"reward.overlong_buffer_tokens = {reward.overlong_buffer_tokens} is more than "
            f"rollout.max_response_tokens = {longest}",
        )


RULES: tuple[Rule, ...] = (
    prompt_sources,
    prompt_rendering,
    model_folders,
    reward_functions,
    reward_settings,
)
