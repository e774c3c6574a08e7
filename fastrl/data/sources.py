"""Rows of a dataset as plain dictionaries: jsonl, parquet and csv files, hub datasets and built-in tasks."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastrl.data.tasks import task_rows
from fastrl.errors import DataError

Row = dict[str, Any]


def read_rows(source: str, *, split: str = "train", options: Mapping[str, Any] | None = None) -> Iterator[Row]:
    """The rows of one source, in order: `task:NAME`, `hub:NAME`, or a .jsonl, .parquet or .csv file.

    Args:
        source: what `data.train` or `data.validation` holds.
        split: "train" or "validation"; picks the half of a task, and names the config key in errors.
        options: keyword options of a task or of `datasets.load_dataset`.

    Raises:
        DataError: the source is missing, cannot be read, or needs an extra that is not installed.
    """
    key = f"data.{split}"
    if source.startswith("task:"):
        return task_rows(source.removeprefix("task:"), split=split, options=options or {})
    if source.startswith("hub:"):
        return _hub_rows(source.removeprefix("hub:"), split, options or {}, key)
    path = Path(source).expanduser()
    readers = {".jsonl": _jsonl_rows, ".json": _jsonl_rows, ".parquet": _parquet_rows, ".csv": _csv_rows}
    if path.suffix.lower() not in readers:
        raise DataError(f"{key} = {source!r}: use a .jsonl, .parquet or .csv file, task:NAME or hub:NAME")
    if path.is_dir():
        raise DataError(f"{key} = {source!r}: is a folder; give a file in it")
    if not path.is_file():
        raise DataError(f"{key} = {source!r}: no such file (looked for {path.absolute()})")
    return _readable(readers[path.suffix.lower()](path, key), path, key)


def _readable(rows: Iterator[Row], path: Path, key: str) -> Iterator[Row]:
    """The rows; what the file system or the encoding has against them becomes a DataError."""
    try:
        yield from rows
    except UnicodeDecodeError as error:
        wrong = f"byte {error.object[error.start]:#04x} ({error.reason})"
        raise DataError(f"{key} = {str(path)!r}: is not UTF-8 text: {wrong}; convert it first") from None
    except OSError as error:
        raise DataError(f"{key} = {str(path)!r}: cannot be read ({error.strerror or error})") from None


def _jsonl_rows(path: Path, key: str) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                message = f"{path}:{number}:{error.colno}: not valid JSON ({error.msg}); {key} wants one object a line"
                raise DataError(message) from None
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
                raise DataError(f"{path}:{number}: cannot be read as JSON ({error}); {key}") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: a {type(row).__name__}; {key} wants one JSON object a line")
            yield row


def _csv_rows(path: Path, key: str) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        try:
            for row in reader:
                if None in row:
                    raise DataError(f"{path}:{reader.line_num}: more fields than the header has columns ({key})")
                if missing := [name for name, value in row.items() if value is None]:
                    raise DataError(f"{path}:{reader.line_num}: no field for column {', '.join(missing)} ({key})")
                yield {name: _messages_in_text(value) for name, value in row.items()}
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: cannot be read as csv ({error}); {key}") from None


def _messages_in_text(value: Any) -> Any:
    """A csv cell that holds a JSON list of chat messages, parsed; any other cell as it is."""
    if isinstance(value, str) and value.lstrip().startswith("[") and '"role"' in value:
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _parquet_rows(path: Path, key: str) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"{key} = {str(path)!r}: parquet needs pyarrow; pip install 'fastrl[data]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except OSError as error:  # pyarrow's own errors are OSError or ValueError
        raise DataError(f"{key} = {str(path)!r}: cannot be read as parquet ({error})") from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{key} = {str(path)!r}: cannot be read as parquet ({error})") from error


def _hub_rows(name: str, split: str, options: Mapping[str, Any], key: str) -> Iterator[Row]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(f"{key} = 'hub:{name}': needs the datasets package; pip install 'fastrl[data]'") from None
    arguments = {"split": split, **options}
    try:
        dataset = load_dataset(name, **arguments)
    except Exception as error:  # the hub client raises many kinds
        hint = f"arguments {arguments}; set data.{split}_options, e.g. {{name: main, split: train}}"
        raise DataError(f"{key} = 'hub:{name}': {type(error).__name__}: {error} ({hint})") from error
    return (dict(row) for row in dataset)
