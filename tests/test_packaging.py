"""Four packages with generic names: installed from one place, by us alone, importable without side effects."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("shared", "manifests", "stage1_extract", "stage2_train")


def test_all_four_come_from_one_folder() -> None:
    parents = {Path(str(importlib.import_module(name).__file__)).parent.parent for name in PACKAGES}
    assert len(parents) == 1, f"a foreign package shadows one of ours: {parents}"


def test_no_other_distribution_claims_our_names() -> None:
    owners = importlib.metadata.packages_distributions()
    for name in PACKAGES:
        assert set(owners.get(name, [])) <= {"dflash-offline"}, owners[name]


def modules() -> list[str]:
    found = []
    for name in PACKAGES:
        package = importlib.import_module(name)
        found += [
            name,
            *(f"{name}.{item.name}" for item in pkgutil.iter_modules(package.__path__) if item.name != "__main__"),
        ]
    return found


def test_importing_everything_has_no_side_effects(tmp_path: Path) -> None:
    code = f"""
import logging, os, signal, importlib, torch, transformers
# torch names its own compile cache in the environment when parts of it are first imported; we must not.
env = lambda: sorted(item for item in os.environ.items() if not item[0].startswith("TORCHINDUCTOR_"))
before = (env(), list(logging.root.handlers), signal.getsignal(signal.SIGTERM), torch.get_num_threads())
for name in {modules()!r}:
    importlib.import_module(name)
after = (env(), list(logging.root.handlers), signal.getsignal(signal.SIGTERM), torch.get_num_threads())
assert before == after, "an import changed the process"
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_lower_half_never_needs_torch() -> None:
    lower = [
        name
        for name in modules()
        if name.startswith("manifests")
        or name
        in (
            "shared.cli",
            "shared.worker",
            "shared.config",
            "shared.store_layout",
            "shared.progress",
            "shared.atomic",
        )
    ]
    code = "import sys, importlib\nfor n in sys.argv[1:]: importlib.import_module(n)\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, *lower], check=True)
