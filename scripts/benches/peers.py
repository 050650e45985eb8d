"""AReno's own releases, 0.0.3 (before) and 0.10.0 (after its own optimization), to be measured beside this project.

They are not dependencies: their source archives are unpacked in `.peers/` and imported in a process of its own. Their
CPU path imports without CUDA.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benches.case import SCRIPTS

VERSIONS = ("0.0.3", "0.10.0")
FOLDER = SCRIPTS.parent / ".peers"


def peer_path(version: str) -> Path:
    """The unpacked source folder of one release, fetched the first time.

    Raises:
        subprocess.CalledProcessError: pip cannot fetch it.
    """
    folder = FOLDER / f"areno-{version}"
    if not folder.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as download:
            wanted = ["--no-deps", "--no-binary", "areno", f"areno=={version}", "--dest", download]
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted], check=True)
            with tarfile.open(next(Path(download).glob("*.tar.gz"))) as archive:
                archive.extractall(download, filter="data")
            Path(download, folder.name).rename(folder)  # last: an interrupted fetch is fetched again
    return folder


def in_peer(version: str, code: str, *args: object) -> Any:
    """Run Python `code` in a process where `import areno` is that release. Returns the JSON on its last printed line.

    The working directory comes first on the path of `python -c`, before this project's editable install.
    """
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(
        command, cwd=peer_path(version), stdout=subprocess.PIPE, text=True, encoding="utf-8", check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    for version in VERSIONS:
        where = in_peer(version, "import areno, json; print(json.dumps(areno.__file__))")
        print(f"areno {version}: {where}")
