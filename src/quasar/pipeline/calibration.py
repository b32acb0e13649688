"""Prompts to calibrate with: the project's own few, or a file."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

from quasar.errors import InvalidRequestError

_TEXT_KEYS = ("text", "prompt", "inputs_pretokenized")


def own_prompts() -> list[str]:
    """A few texts of different kinds that come with Quasar."""
    return _paragraphs(resources.files("quasar.pipeline").joinpath("calibration.txt").read_text(encoding="utf-8"))


def prompts_from(path: str | Path) -> list[str]:
    """Read prompts from a text file (separated by blank lines) or from JSON lines.

    A JSON line is a string, or an object with one of the keys ``text``, ``prompt`` and ``inputs_pretokenized``.

    Raises:
        InvalidRequestError: The file cannot be read, or has no prompt in it.
    """
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
        prompts = _from_json_lines(content) if Path(path).suffix == ".jsonl" else _paragraphs(content)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"calibration prompts cannot be read from {path}: {error}") from error
    if not prompts:
        raise InvalidRequestError(f"{path} has no calibration prompt in it")
    return prompts


def _paragraphs(content: str) -> list[str]:
    return [paragraph.strip() for paragraph in re.split(r"\n\s*\n", content) if paragraph.strip()]


def _from_json_lines(content: str) -> list[str]:
    # Not splitlines(): a JSON string may hold line separators other than these.
    return [_text_of(json.loads(line)) for line in content.split("\n") if line.strip()]


def _text_of(record: object) -> str:
    texts = [record[key] for key in _TEXT_KEYS if key in record] if isinstance(record, dict) else [record]
    if not texts:
        raise ValueError(f"a record has none of the keys {', '.join(_TEXT_KEYS)}: {record!r:.80}")
    if not isinstance(texts[0], str):
        raise ValueError(f"a record has no text, but {texts[0]!r:.80}")
    return texts[0]
