"""Data set rows from a local file, a saved folder, the hub, or a loader function of the user's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from areno.errors import UsageError
from areno.hub import hub_reachable
from areno.user_file import UserFile, where

Row = dict[str, Any]
LOADER_NAME = "load_training_dataset"


def load_rows(dataset_path: str, loader_spec: str | None = None, **options: Any) -> Sequence[Row]:
    """The rows of a data set, in its own order.

    Args:
        dataset_path: NAME[:CONFIG[:SPLIT]] of the datasets library, a file, a saved folder, or what the loader expects.
        loader_spec: FILE[:FUNCTION]; called as `function(dataset_path, default_loader=..., **options)` where
            `default_loader(path)` reads everything that works without a loader.

    Raises:
        UsageError: nothing can be read, or there is not a single row.
    """
    rows = read_rows(dataset_path) if loader_spec is None else _call_loader(loader_spec, dataset_path, options)
    if len(rows) == 0:
        source = f"--dataset-path {dataset_path}" if loader_spec is None else f"--dataset-loader-fn {loader_spec}"
        raise UsageError(f"{source} gave no rows; a run needs at least one.")
    return rows


def load_function(loader_spec: str) -> tuple[Callable[..., Any], Path]:
    """The function that `--dataset-loader-fn FILE[:FUNCTION]` names, and its file.

    Raises:
        UsageError: the file is missing or broken, or does not define the function.
    """
    path, colon, name = loader_spec.rpartition(":")
    if not (colon and name.isidentifier()):
        path, name = loader_spec, LOADER_NAME
    module = UserFile.at(path, "--dataset-loader-fn").module()
    function = getattr(module, name, None)
    file = Path(path).expanduser().resolve()
    if not callable(function):
        raise UsageError(
            f"--dataset-loader-fn: {file} does not define {name}(dataset_path, *, default_loader); "
            f"add it, or name another function with FILE:FUNCTION."
        )
    return function, file


def _call_loader(loader_spec: str, dataset_path: str, options: Row) -> Sequence[Row]:
    function, file = load_function(loader_spec)
    try:
        return as_sequence(function(dataset_path, default_loader=read_rows, **options))
    except UsageError:
        raise
    except Exception as exc:
        raise UsageError(
            f"--dataset-loader-fn {loader_spec} failed on {dataset_path}: {where(exc, file)}; "
            f"mend the loader or the path."
        ) from exc


def as_sequence(rows: Iterable[Row]) -> Sequence[Row]:
    """Rows that can be counted and picked by index: as they are where they can, a list otherwise."""
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, (dict, str)):
        return cast(Sequence[Row], rows)  # a list, a datasets.Dataset, ...
    if isinstance(rows, (dict, str)) or not isinstance(rows, Iterable):
        raise TypeError(f"expected a list of rows, got {type(rows).__name__}")
    return list(rows)


def read_rows(dataset_path: str) -> Sequence[Row]:
    """Rows of anything that needs no loader function: a file, a saved folder, or a name of the datasets library.

    Raises:
        UsageError: there is nothing under that path or name, or it cannot be read.
    """
    path = Path(dataset_path).expanduser()
    if path.is_dir():
        return _read_saved_folder(path)
    if path.is_file():
        return _read_file(path)
    looks_local = dataset_path.startswith(("/", ".", "~")) or dataset_path.count("/") > 1
    if looks_local or path.suffix.lower() in _READERS:
        raise UsageError(f"--dataset-path: there is no file or folder {path.resolve()}; check the path.")
    return _read_hub(dataset_path)


def _read_file(path: Path) -> list[Row]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"--dataset-path: cannot tell the format of {path}; use one of {', '.join(_READERS)}, "
            f"or read it in a --dataset-loader-fn."
        )
    try:
        return reader(path)
    except (ValueError, OSError) as exc:  # what json, pandas and pyarrow raise for content that they cannot read
        said = " ".join(str(exc).split())
        raise UsageError(f"--dataset-path: {path} cannot be read as {path.suffix[1:]}: {said}; mend the file.") from exc


def _read_json_lines(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append(_an_object(json.loads(line)))
            except ValueError as exc:
                raise ValueError(f"line {number}: {exc}") from exc
    return rows


def _read_json(path: Path) -> list[Row]:
    text = path.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        return _read_json_lines(path)
    return [_an_object(value) for value in json.loads(text)]


def _an_object(value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object with named columns, got {type(value).__name__}")
    return value


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def _read_csv(path: Path) -> list[Row]:
    import pandas  # type: ignore[import-untyped]

    # Every cell stays the text that it is: a prompt may be "1" or "nan".
    rows: list[Row] = pandas.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
    return rows


_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def _read_saved_folder(path: Path) -> Sequence[Row]:
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except FileNotFoundError as exc:
        raise UsageError(
            f"--dataset-path: the folder {path} was not saved by the datasets library (save_to_disk); "
            f"pass a file in it, or read it in a --dataset-loader-fn."
        ) from exc
    return _one_split(saved, str(path))


def _read_hub(dataset_path: str) -> Sequence[Row]:
    import datasets

    name, config, split = (*dataset_path.split(":"), "", "")[:3]
    if dataset_path.count(":") > 2 or not name:
        raise UsageError(f"--dataset-path {dataset_path}: write NAME, NAME:CONFIG or NAME:CONFIG:SPLIT.")
    if not hub_reachable() and not _in_cache(name):
        raise UsageError(
            f"--dataset-path {dataset_path}: no such file or folder here, and the hub cannot be reached to look for a "
            f"data set of that name; check the spelling and the network, pass a local file, or name a loader for it with "
            f"--dataset-loader-fn."
        )
    try:
        found = datasets.load_dataset(name, config or None, split=split or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as exc:
        said = " ".join(str(exc).split())
        raise UsageError(f"--dataset-path {dataset_path}: the datasets library cannot load it: {said}") from exc
    return _one_split(found, dataset_path)


def _in_cache(name: str) -> bool:
    import datasets.load

    if name.count("/") > 1:
        return False
    try:
        datasets.load.CachedDatasetModuleFactory(name).get_module()
    except FileNotFoundError:
        return False
    return True


def _one_split(found: Any, source: str) -> Sequence[Row]:
    """The train split, or the only one."""
    if not isinstance(found, dict):
        return as_sequence(found)
    if "train" in found or len(found) == 1:
        return as_sequence(found.get("train", next(iter(found.values()))))
    raise UsageError(
        f"--dataset-path {source} has the splits {', '.join(found)} and none is called train; "
        f"name one with NAME:CONFIG:SPLIT, or pick it in a --dataset-loader-fn."
    )
