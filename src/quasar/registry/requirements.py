"""Whether a plug-in was made for this version of Quasar: what its metadata requires, next to what is installed."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

OWN_DISTRIBUTION = "quasar-decode"


def misfit(requires: Iterable[str] | None, own_version: str) -> str | None:
    """Why a distribution does not fit this version of Quasar, or ``None`` if it does or says nothing of it.

    Args:
        requires: Its ``Requires-Dist`` lines. Those of extras, and those whose marker excludes this Python or this
            machine, do not count; neither does a line that cannot be read, which is for the installer to refuse.
        own_version: The version of Quasar that is running, compared as an installer does (PEP 440).
    """
    for line in requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) != OWN_DISTRIBUTION:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(own_version, prereleases=True):
            return f"needs {OWN_DISTRIBUTION}{requirement.specifier}; this is {OWN_DISTRIBUTION} {own_version}"
    return None
