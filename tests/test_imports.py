"""What a fresh interpreter imports: the contract needs nothing, the splitter no torch, the loader no splitter."""

import json
import subprocess
import sys
from collections.abc import Collection

import pytest

MODULES = """
import importlib, json, pkgutil, sys
for package in {packages}:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        if found.name not in {left_out}:
            importlib.import_module(found.name)
print(json.dumps(sorted(name for name in sys.modules)))
"""
HEAVY = {"torch", "numpy", "transformers", "diffusers", "huggingface_hub", "tqdm", "safetensors", "click", "gguf"}


def imported(code: str) -> set[str]:
    """Return the first parts of the names of all modules that a fresh interpreter has after running the code."""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return {name.split(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}


def after_importing_all_of(*packages: str, left_out: Collection[str] = ()) -> set[str]:
    return imported(MODULES.format(packages=packages, left_out=tuple(left_out)))


def test_the_contract_needs_the_standard_library_and_two_small_packages() -> None:
    found = after_importing_all_of("manifests")
    assert not found & (HEAVY | {"reshard", "loader"})
    ours = found - set(sys.stdlib_module_names) - {"__main__", "manifests"}
    # What a virtual environment starts by itself is not ours; msgspec takes typing_extensions where it is installed.
    at_start = imported("import json, sys\nprint(json.dumps(list(sys.modules)))")
    assert ours - at_start <= {"msgspec", "xxhash", "typing_extensions"}


def test_the_splitter_imports_neither_torch_nor_the_loader() -> None:
    found = after_importing_all_of("reshard", left_out=("reshard.__main__",))
    assert not found & {"torch", "loader", "transformers", "diffusers", "safetensors"}


def test_the_loader_does_not_import_the_splitter() -> None:
    found = after_importing_all_of("loader")
    assert not found & {"reshard", "transformers", "diffusers"}


@pytest.mark.parametrize("code", ["import reshard", "import reshard; reshard.__version__", "import reshard.catalogue"])
def test_importing_the_package_imports_nothing_large(code: str) -> None:
    assert not imported(f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))") & (HEAVY - {"click"})


def test_the_package_offers_its_functions_when_they_are_asked_for() -> None:
    import reshard

    assert {name: getattr(reshard, name).__name__ for name in reshard.__all__ if name != "__version__"} == {
        "check": "check",
        "merge": "merge",
        "plan": "plan",
        "propose": "propose",
        "split": "split",
        "verify": "verify",
    }
    with pytest.raises(AttributeError, match="no attribute 'load'"):
        _ = reshard.load
