"""What a drafter may ask to see of a verification, by name."""

from __future__ import annotations

import re
from collections.abc import Collection

from quasar.errors import UnsupportedModelError


def hidden_states_of(needs: Collection[str], n_layers: int, who: str) -> dict[str, int]:
    """Which hidden states are asked for: the index from 0 of each, by its name.

    Index 0 is the embedding, index i what layer i gives, and the last, which is also −1, what the output head sees: the
    order of transformers' ``output_hidden_states``.

    Args:
        needs: Names of features, ``"hidden:INDEX"``.
        n_layers: How many layers the model has.
        who: The verifier, for the message.

    Raises:
        UnsupportedModelError: A name that is none of these.
    """
    found = {}
    for name in needs:
        match = re.fullmatch(r"hidden:(-?\d+)", name)
        index = int(match.group(1)) if match else n_layers + 1
        if not -n_layers - 1 <= index <= n_layers:
            raise UnsupportedModelError(
                f"the drafter needs {name!r}; {who} has 'hidden:-1', the last hidden states, and others from "
                f"'hidden:0' to 'hidden:{n_layers}'"
            )
        found[name] = index % (n_layers + 1)
    return found
