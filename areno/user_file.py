"""Python files that the user passes in: read once, run under a module name of their own, failures told by file and line."""

from __future__ import annotations

import hashlib
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from areno.errors import UsageError


@dataclass(frozen=True)
class UserFile:
    """A file as it was when it was read. Other processes run this text, so that an edit on disk during a run cannot be
    picked up by some of them; files that it imports are read where it runs."""

    path: str
    text: bytes

    @classmethod
    def at(cls, path: str | Path, option: str) -> UserFile:
        """Read the file that `option` names.

        Raises:
            UsageError: no such file, or it cannot be read.
        """
        full = Path(path).expanduser().resolve()
        try:
            return cls(str(full), full.read_bytes())
        except OSError as error:
            raise UsageError(f"{option}: {full} cannot be read ({error.strerror}); check the path.") from error

    def module(self) -> ModuleType:
        """Run the file; a second call in the same process returns the same module.

        The module's name is made from path and text, so that a file may be called `math.py` and that what it defines
        can be pickled. Its folder goes to the end of `sys.path`: it may import its neighbours and shadows nothing.

        Raises:
            UsageError: it does not compile, or stops with an error.
        """
        digest = hashlib.sha256(self.path.encode() + b"\0" + self.text).hexdigest()[:16]
        name = f"areno_user_{Path(self.path).stem}_{digest}"
        if name in sys.modules:
            return sys.modules[name]
        module = ModuleType(name)
        module.__file__ = self.path
        folder = str(Path(self.path).parent)
        if folder not in sys.path:
            sys.path.append(folder)
        sys.modules[name] = module
        try:
            exec(compile(self.text, self.path, "exec"), module.__dict__)
        except KeyboardInterrupt:
            del sys.modules[name]
            raise
        except BaseException as error:  # also SystemExit: a file that calls sys.exit() must not end us without a word
            del sys.modules[name]
            raise UsageError(f"{where(error, self.path)}; mend the file.") from error
        return module


def where(error: BaseException, path: str | Path) -> str:
    """`file:line: Kind: message`, the line being the last one inside the file."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}:{error.lineno}: {type(error).__name__}: {error.msg}"
    return f"{line_in_file(error, str(path))}: {describe(error)}"


def describe(error: BaseException) -> str:
    """Type and message of an exception on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def line_in_file(error: BaseException, path: str) -> str:
    """`path:line` of the innermost frame in that file, or the path alone."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{lines[-1]}" if lines else path
