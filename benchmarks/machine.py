"""The machine that a measurement was made on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("numpy", "torch")


def describe() -> dict[str, str | int]:
    """Processor, cores, memory, system, and versions of the libraries that do the arithmetic."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        **({"gpu": gpu} if (gpu := _gpu()) else {}),
    }


def in_words(machine: dict[str, str | int]) -> str:
    """The description as one line."""
    words = [
        f"{machine['cores']} cores of {machine['processor']}",
        f"{machine['memory_gib']} GiB",
        *([f"{machine['gpu']}"] if "gpu" in machine else []),
        f"{machine['system']}, Python {machine['python']}",
        *[f"{name} {machine[name]}" for name in PACKAGES if machine.get(name)],
    ]
    return ", ".join(words)


def processor() -> str:
    """The processor's name, with family and model if Linux states them: clouds shorten the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    name = found.get("model name", platform.machine())
    numbers = [f"{key} {found[key]}" for key in ("cpu family", "model") if key in found]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return ""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
