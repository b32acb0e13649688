"""Whether the Hub can be reached, asked once and quickly: its own client asks for each file again for minutes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants, try_to_load_from_cache

from quasar.checkpoints.places import DEMO_MODEL
from quasar.errors import ModelNotFoundError
from quasar.options import did_you_mean

_SECONDS = 5.0
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def how_to_reach(name: str) -> dict[str, Any]:
    """Further arguments for transformers, so that it looks no longer for a model than it takes.

    Raises:
        ModelNotFoundError: The Hub cannot be reached, and the model has not been downloaded.
    """
    if constants.HF_HUB_OFFLINE or any(os.environ.get(proxy) for proxy in _PROXIES):
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None
    else:
        reason = _why_out_of_reach()
    if reason is None:
        return {}
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return {"local_files_only": True}
    raise ModelNotFoundError(
        f"model {name!r} cannot be loaded: it has not been downloaded, and {reason}. Without a network there are "
        f"folders, .gguf files and the demo model {DEMO_MODEL!r}.{did_you_mean(name, [DEMO_MODEL])}"
    )


def _why_out_of_reach() -> str | None:
    """Why a connection to the Hub fails; ``None`` where it does not."""
    host = urlsplit(constants.ENDPOINT)
    place = (host.hostname or "", host.port or (80 if host.scheme == "http" else 443))
    try:
        socket.create_connection(place, timeout=_SECONDS).close()
    except OSError as error:
        return f"{place[0]} cannot be reached ({error.strerror or error})"
    return None


def is_on_the_hub(arguments: dict[str, Any]) -> bool:
    """Whether a model is named by its id, not by a place on this machine."""
    return not Path(arguments["pretrained_model_name_or_path"]).exists()
