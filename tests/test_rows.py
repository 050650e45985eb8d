"""Reading data sets: every source gives the same rows, and every bad one a sentence that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areno import rows as rows_module
from areno.errors import UsageError
from areno.rows import load_rows

ROWS = [{"prompt": "中文 é 🙂\u2028?", "solutions": ["1", "2"]}, {"prompt": "b", "solutions": ["3"]}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    elif path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["数据 é.jsonl", "rows.json", "rows.parquet"])
def test_local_files(tmp_path: Path, name: str) -> None:
    assert list(load_rows(str(write(tmp_path / name, ROWS)))) == ROWS


def test_json_lines_under_the_name_json_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\ufeff" + "\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    assert list(load_rows(str(path))) == ROWS


def test_csv_cells_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    long = "x" * 200_000
    path.write_text(f'prompt,solutions\n"a\nb, ""c""",007\nnan,\n{long},1\n', encoding="utf-8")
    assert load_rows(str(path)) == [
        {"prompt": 'a\nb, "c"', "solutions": "007"},
        {"prompt": "nan", "solutions": ""},
        {"prompt": long, "solutions": "1"},
    ]


def test_saved_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([0])}).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict({"a": one, "b": one}).save_to_disk(tmp_path / "no_train")
    assert list(load_rows(str(tmp_path / "one"))) == ROWS
    assert list(load_rows(str(tmp_path / "splits"))) == ROWS
    with pytest.raises(UsageError, match="splits a, b and none is called train"):
        load_rows(str(tmp_path / "no_train"))


@pytest.mark.parametrize(
    ("path", "expected"),
    [("gsm8k", ("gsm8k", None, None)), ("a/b:main", ("a/b", "main", None)), ("a/b::test", ("a/b", None, "test"))],
)
def test_names_of_the_datasets_library(monkeypatch: pytest.MonkeyPatch, path: str, expected: tuple[Any, ...]) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def fake(name: str, config: str | None, *, split: str | None) -> Any:
        asked.append((name, config, split))
        return ROWS if split else {"train": ROWS, "test": []}

    monkeypatch.setattr(rows_module, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert list(load_rows(path)) == ROWS
    assert asked == [expected]


def test_what_the_datasets_library_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fake(*_: Any, **__: Any) -> Any:
        raise ValueError("Config name is missing.\nPick one among: ['main', 'socratic']")

    monkeypatch.setattr(rows_module, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", fake)
    with pytest.raises(UsageError, match=r"^--dataset-path gsm8k: .*Pick one among: \['main', 'socratic'\]$"):
        load_rows("gsm8k")


def test_no_hub_and_not_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr(rows_module, "hub_reachable", lambda: False)
    with pytest.raises(UsageError, match=r"no/such-thing:main: no such file .* hub cannot be reached"):
        load_rows("no/such-thing:main")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"bad\.jsonl cannot be read as jsonl: line 2: "),
        ("list.jsonl", "[1]\n", r"line 1: expected an object with named columns, got list"),
        ("bad.json", "[{]", r"bad\.json cannot be read as json"),
        ("bad.parquet", "not parquet", r"bad\.parquet cannot be read as parquet"),
        ("bad.csv", "", r"bad\.csv cannot be read as csv"),
        ("rows.txt", "a", r"cannot tell the format of .*rows\.txt"),
        ("empty.jsonl", "\n", r"gave no rows"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        load_rows(str(path))


def test_bytes_that_are_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(UsageError, match=r"cannot be read as jsonl: .*utf-8"):
        load_rows(str(path))


@pytest.mark.parametrize("path", ["missing.jsonl", "/no/such/place", "./gsm8k", "a/b/c"])
def test_missing_files(path: str) -> None:
    with pytest.raises(UsageError, match=r"there is no file or folder /.*; check the path"):
        load_rows(path)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(UsageError, match="was not saved by the datasets library"):
        load_rows(str(tmp_path))


class TestLoader:
    def write(self, tmp_path: Path, code: str, name: str = "math.py") -> str:
        path = tmp_path / name
        path.write_text(code, encoding="utf-8")
        return str(path)

    def test_default_loader_options_sibling_and_generator(self, tmp_path: Path) -> None:
        (tmp_path / "areno_test_sibling.py").write_text("MARK = '!'\n", encoding="utf-8")
        spec = self.write(
            tmp_path,
            "def load_training_dataset(dataset_path, *, default_loader, limit=9):\n"
            "    from areno_test_sibling import MARK\n"
            "    for row in list(default_loader(dataset_path))[:limit]:\n"
            "        yield {'prompt': row['prompt'] + MARK}\n",
        )
        data = str(write(tmp_path / "rows.jsonl", ROWS))
        assert load_rows(data, spec) == [{"prompt": row["prompt"] + "!"} for row in ROWS]
        assert load_rows(data, spec, limit=1) == [{"prompt": ROWS[0]["prompt"] + "!"}]

    def test_another_function(self, tmp_path: Path) -> None:
        spec = self.write(tmp_path, "def mine(dataset_path, *, default_loader): return [{'prompt': dataset_path}]\n")
        assert load_rows("x:y", spec + ":mine") == [{"prompt": "x:y"}]

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("def f(:\n", r"math\.py:1: SyntaxError"),
            ("import no_such_module_at_all\n", r"math\.py:1: ModuleNotFoundError"),
            ("x = 1\n\nraise SystemExit(3)\n", r"math\.py:3: SystemExit: 3"),
            (
                "load_training_dataset = 1\n",
                r"does not define load_training_dataset\(dataset_path, \*, default_loader\)",
            ),
            ("def load_training_dataset():\n    return []\n", r"failed on d: .*TypeError"),
            ("def load_training_dataset(p, **_):\n    return {}['a']\n", r"math\.py:2: KeyError: 'a'"),
            ("def load_training_dataset(p, **_):\n    yield 1\n    1 / 0\n", r"math\.py:3: ZeroDivisionError"),
            ("def load_training_dataset(p, **_):\n    return 'text'\n", r"expected a list of rows, got str"),
            ("def load_training_dataset(p, **_):\n    return []\n", r"gave no rows"),
            (
                "def load_training_dataset(p, default_loader):\n    return default_loader('no.csv')\n",
                r"there is no file",
            ),
        ],
    )
    def test_faults(self, tmp_path: Path, code: str, said: str) -> None:
        with pytest.raises(UsageError, match=said):
            load_rows("d", self.write(tmp_path, code))

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=f"{tmp_path}/none.py cannot be read"):
            load_rows("d", str(tmp_path / "none.py"))
