"""Python files that the user passes in: loaded by path, once per process, with failures told by file and line."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from areno.errors import UsageError


def load_user_file(path: str, option: str) -> ModuleType:
    """Run the file and return its module; a second call for the same file returns the same module.

    The module's name is made from the full path, so that a file may be called `math.py`. Its folder goes to the end
    of `sys.path`: it may import its neighbours, now or inside a function, and shadows nothing.

    Raises:
        UsageError: the file is missing, or stops with an error while it is loaded. `option` is named in the message.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UsageError(f"{option}: there is no file {file}; check the path.")
    name = f"areno_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{option}: {file} is not a Python file; pass a file whose name ends in .py.")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as exc:
        del sys.modules[name]
        raise UsageError(f"{option}: {where(exc, file)}; mend the file.") from exc
    return module


def where(exc: BaseException, file: Path) -> str:
    """`file:line: Kind: message`, the line being the last one inside the file."""
    if isinstance(exc, SyntaxError):
        return f"{exc.filename or file}:{exc.lineno}: {type(exc).__name__}: {exc.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(exc.__traceback__) if frame.filename == str(file)]
    place = f"{file}:{lines[-1]}" if lines else str(file)
    return f"{place}: {type(exc).__name__}: {exc}"
