"""Spec strings such as ``"ngram:k=5,max_n=3"``: a name, and options."""

from __future__ import annotations

from quasar.errors import InvalidRequestError

Option = int | float | bool | str


def parse_spec(spec: str) -> tuple[str, dict[str, Option]]:
    """Split ``"name:option=value,…"``; values that read as int, float or true/false become that, others stay text.

    Parentheses protect commas, colons and equals signs, to any depth. A value that stands in parentheses as a whole is
    the text inside, as it is: ``"nested:drafter=(ngram:k=3,max_n=2),k=16"``.

    Raises:
        InvalidRequestError: No name, an option without a value, an option given twice, unbalanced parentheses.
    """
    name, _, rest = spec.partition(":")
    if not name.strip():
        raise InvalidRequestError(f"{spec!r} has no name; write 'name' or 'name:option=value,option=value'")
    if _has_parenthesis(name):
        raise InvalidRequestError(f"{spec!r}: parentheses go around a value, as in 'name:option=(…)'")
    options: dict[str, Option] = {}
    for part in _split(rest, spec) if rest.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value) or _has_parenthesis(key):
            raise InvalidRequestError(f"{part.strip()!r} in {spec!r} is not option=value")
        if key in options:
            raise InvalidRequestError(f"option {key!r} is given twice in {spec!r}")
        options[key] = _parse_value(value)
    return name.strip(), options


def _split(options: str, spec: str) -> list[str]:
    """The pieces of ``options``, a part of ``spec``, between the commas that no parentheses protect."""
    pieces, depth = [""], 0
    for character in options:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            raise InvalidRequestError(f"{spec!r} has a ')' without its '('")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    if depth > 0:
        raise InvalidRequestError(f"{spec!r} has a '(' without its ')'")
    return pieces


def _has_parenthesis(text: str) -> bool:
    return "(" in text or ")" in text


def _is_wrapped(value: str) -> bool:
    """Whether the first character opens the parenthesis that the last one closes."""
    depth = 0
    for i, character in enumerate(value):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i > 0 and i == len(value) - 1
    return False


def _parse_value(value: str) -> Option:
    if _is_wrapped(value):
        return value[1:-1]
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return value
