"""What a number was measured on."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = (
    "numpy",
    "torch",
    "zarr",
    "numcodecs",
    "tensorstore",
    "h5py",
    "torchrl",
    "tensordict",
    "cpprb",
    "rlinf",
    "trajstore",
)


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, system, and versions of the packages; nothing that names the host or its folders."""
    return {
        "processor": _processor(),
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
