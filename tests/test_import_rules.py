"""The house: each place imports only from below, and the light places stay light."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the bottom up. A file may import from floors below its own, and from its own floor.
FLOORS = [
    ["areno/__init__", "areno/errors", "areno/knobs", "areno/lazy"],
    ["areno/config", "areno/user_file", "areno/hub"],
    ["areno/api", "areno/metrics"],
    ["areno/terminal", "areno/rows", "areno/terminal_reward"],
    ["areno/materialize", "areno/data", "areno/run_log"],
    ["areno/engine"],
    ["areno/executor"],
    ["areno/step_metrics"],
    ["areno/trainer", "ray_workers"],
    ["areno/cli"],
]

FORBIDDEN = {
    "areno/api": {"ray", "transformers", "logging", "areno.config", "ray_workers"},
    "areno/knobs": {"torch", "transformers", "ray"},
    "areno/config": {"torch", "transformers", "ray"},
    "areno/materialize": {"ray", "ray_workers", "areno.trainer", "areno.engine", "areno.executor"},
    "areno/engine": {"ray", "ray_workers", "areno.trainer", "areno.cli"},
    "areno/executor": {"ray", "ray_workers"},
    "areno/trainer": {"ray", "transformers", "torch", "ray_workers"},
    "ray_workers": {"areno.cli", "areno.trainer"},
}


def modules() -> list[Path]:
    return sorted([*ROOT.glob("areno/**/*.py"), *ROOT.glob("ray_workers/**/*.py")])


def imports(path: Path, *, at_top_only: bool = False, typing: bool = False) -> set[str]:
    """Dotted names that a file imports, its functions' imports included unless told otherwise, those for type checkers
    only if asked for."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    names: set[str] = set()
    for node in tree.body if at_top_only else ast.walk(tree):
        if node in typing_only and not typing:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def floor_of(name: str) -> int | None:
    place = name.replace(".", "/")
    found = [(len(p), i) for i, floor in enumerate(FLOORS) for p in floor if place == p or place.startswith(p + "/")]
    return max(found)[1] if found else None


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_from_below(path: Path) -> None:
    place = str(path.relative_to(ROOT).with_suffix("")).removesuffix("/__init__") or "areno/__init__"
    mine = floor_of("areno/__init__" if place == "areno" else place)
    assert mine is not None, f"{place} is on no floor: give it one in this test"
    for name in imports(path):
        if not name.startswith(("areno", "ray_workers")):
            continue
        theirs = floor_of(name)
        if theirs is None:  # a name out of the package's root module
            continue
        lazily = place.startswith("areno/cli") or name not in imports(path, at_top_only=True)
        assert theirs <= mine or lazily, f"{place} imports {name} from a floor above"


def test_files_import_each_other_in_no_circle() -> None:
    files = {
        str(path.relative_to(ROOT).with_suffix("")).removesuffix("/__init__").replace("/", "."): path
        for path in modules()
    }
    graph = {
        name: {there for there in imports(path, typing=True) & files.keys() if there != name}
        for name, path in files.items()
    }
    # A package's face hands names on without importing them, so it is in no circle.
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(("place", "names"), FORBIDDEN.items())
def test_forbidden_imports(place: str, names: set[str]) -> None:
    for path in modules():
        here = str(path.relative_to(ROOT).with_suffix(""))
        if here == place or here.startswith(place + "/"):
            bad = {i for i in imports(path) for n in names if i == n or i.startswith(n + ".")}
            assert not bad, f"{here} must not import {sorted(bad)}"


def test_ray_workers_is_imported_only_inside_the_function_that_handles_ray() -> None:
    for path in ROOT.glob("areno/**/*.py"):
        assert not any(n.split(".")[0] in ("ray_workers", "ray") for n in imports(path, at_top_only=True)), path


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import areno.config, areno.cli.main", {"torch", "transformers", "ray", "numpy", "datasets"}),
        ("from areno.api import compute_batch_group_advantages, RewardRecord", {"torch", "transformers", "ray"}),
        ("import areno.materialize.shard", {"ray", "transformers"}),
        ("import areno.materialize.scorer_child", {"torch", "ray", "transformers", "datasets"}),
        ("import areno.trainer", {"ray"}),
    ],
)
def test_light_imports_stay_light(statement: str, absent: set[str]) -> None:
    code = f"{statement}\nimport sys\nprint(' '.join(m for m in {sorted(absent)!r} if m in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert found.split() == []
