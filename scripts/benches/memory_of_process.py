"""Memory of this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def forget_peak() -> None:
    """Begin a new peak from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_mib() -> float:
    return _status("VmRSS")


def peak_mib() -> float:
    return _status("VmHWM")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
