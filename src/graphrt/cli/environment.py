"""What ``graphrt env`` tells: versions, devices and extras, wherever any of them may be missing."""

from __future__ import annotations

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Everything, as JSON. What is absent is None; what failed is a sentence in ``problems``."""
    problems: list[str] = []
    cuda = _cuda(problems)
    try:
        extras = _extras(requires("graphrt") or [])
    except PackageNotFoundError:
        extras = {}
        problems.append("graphrt is imported but not installed: version and extras are unknown")
    return {
        "graphrt": _version("graphrt"),
        "location": str(Path(__file__).parents[1]),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        **cuda,
        "extras": extras,
        "problems": problems,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The same for people: a line for each name, what a name contains indented below it."""
    devices = [
        f"  {item['name']}, compute capability {item['compute_capability']},"
        f" {item['memory_bytes'] / 2**30:.1f} GiB"
        for item in found["devices"]
    ]
    extras = []
    for extra, packages in found["extras"].items():
        missing = [name for name, number in packages.items() if number is None]
        have = [f"{name} {number}" for name, number in packages.items() if number is not None]
        status = f"missing {', '.join(missing)}" if missing else f"installed: {', '.join(have)}"
        extras.append(f"  {extra}: {status}")
    single = [name for name, value in found.items() if not isinstance(value, list | dict)]
    return [
        *(f"{name}: {'none' if found[name] is None else found[name]}" for name in single),
        "devices:" if devices else "devices: none; the simulated one needs no GPU",
        *devices,
        *(["extras:"] if extras else []),
        *extras,
        *(f"problem: {text}" for text in found["problems"]),
    ]


def _cuda(problems: list[str]) -> dict[str, Any]:
    """torch's version, the CUDA it was built for, the driver, and the devices it sees."""
    found: dict[str, Any] = {"torch": None, "cuda": None, "driver": None, "devices": []}
    try:
        import torch

        from graphrt.device.cuda.device import visible_devices
        from graphrt.device.cuda.private import driver_version
    # OSError: a library that torch loads is absent.
    except (ImportError, OSError) as error:
        problems.append(f"torch cannot be imported: {error}")
        return found
    found |= {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    found["driver"] = driver_version()
    try:
        found["devices"] = [device._asdict() for device in visible_devices()]
    except RuntimeError as error:
        problems.append(f"torch sees a GPU and cannot use it: {error}")
    return found


def _extras(requirements: list[str]) -> dict[str, dict[str, str | None]]:
    """The packages of each extra, with their versions or None."""
    found: dict[str, dict[str, str | None]] = {}
    for requirement in requirements:
        # name[more]>=1.0; extra == "report"
        parts = re.match(r"""([\w.-]+).*\bextra == ['"]([\w-]+)['"]""", requirement)
        if parts:
            package, extra = parts.groups()
            found.setdefault(extra, {})[package] = _version(package)
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
