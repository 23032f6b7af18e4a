"""What every result carries and every long job shows: provenance, whole JSON files, a progress bar.

Imports nothing of ours, so that any room may use it.
"""

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# People read stdout; progress goes to stderr, so that results can be piped.
console = Console(stderr=True)

VERSIONS = (
    "seqmix", "torch", "triton", "transformers", "accelerate", "tokenizers", "datasets",
    "flash-linear-attention",
)  # fmt: skip


def provenance() -> dict[str, Any]:
    """Return what made a result: commit, package versions, machine and time."""
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version(), **versions()},
        "machine": machine(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def versions() -> dict[str, str | None]:
    """Return the installed version of each package that results depend on, None where absent."""
    found: dict[str, str | None] = {}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """Return the commit of this source tree, "+" if files differ from it; None for a wheel."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    git = ["git", "-C", str(here)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def machine() -> dict[str, Any]:
    """Return the platform, the processor count and the GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"platform": platform.platform(), "processors": os.cpu_count(), "gpus": gpus}


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` to `path`: the file is there whole, or as it was before."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")
    partial.replace(path)


def progress(*columns: str, shown: bool = True) -> Progress:
    """Return a progress bar on stderr, with a task's `columns`; nothing is drawn off a terminal."""
    layout = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    layout += [TextColumn("{task.fields[" + name + "]}") for name in columns]
    disable = not (shown and sys.stderr.isatty())
    return Progress(*layout, TimeRemainingColumn(), console=console, disable=disable)
