"""Third-party packages: find, then load, then validate; one broken package never takes the others down.

Finding reads metadata only. Loading imports the module an entry point names; whatever it raises is kept as the cause.
Validating registers it with a pluggy manager of its own, so that each result and each error has an origin: a hook
that does not exist, an argument it does not take, a value that is no ``{name: factory}``.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata

import attrs
import pluggy

from quasar.errors import PluginError
from quasar.protocols import AcceptancePolicy, Bindable, CheckpointFormat, Drafter, Kernel, Quantizer, Verifier
from quasar.registry import builtins, hookspecs
from quasar.registry.hookspecs import Factory
from quasar.registry.signatures import check_class

ENTRY_POINT_GROUP = "quasar"
LIMIT_VARIABLE = "QUASAR_PLUGINS"

KINDS: Mapping[str, tuple[str, type]] = {
    "drafter": ("quasar_drafters", Drafter),
    "verifier": ("quasar_verifiers", Verifier),
    "quantizer": ("quasar_quantizers", Quantizer),
    "policy": ("quasar_policies", AcceptancePolicy),
    "kernel": ("quasar_kernels", Kernel),
    "checkpoint": ("quasar_checkpoints", CheckpointFormat),
}


@attrs.frozen(order=True)
class Origin:
    """Where a strategy comes from: a distribution, its version and the entry point in it."""

    distribution: str
    version: str
    entry_point: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} [{self.entry_point}]"


@attrs.frozen
class Entry:
    """One strategy that a plug-in provides."""

    kind: str
    name: str
    factory: Factory
    origin: Origin


@attrs.frozen
class LoadedPlugin:
    """One plug-in: what it provides, or why it provides nothing."""

    origin: Origin
    entries: tuple[Entry, ...] = ()
    error: PluginError | None = None


def load_plugins() -> tuple[LoadedPlugin, ...]:
    """The built-in strategies first, then every installed plug-in in the order of (distribution, entry point).

    The environment variable ``QUASAR_PLUGINS`` limits third-party plug-ins to the entry points or distributions it
    names, separated by commas; set to nothing, it lets none load.
    """
    own = Origin("quasar-decode", _own_version(), "builtins")
    return (LoadedPlugin(own, _entries_of(builtins, own)), *map(_load, _find()))


def _own_version() -> str:
    from quasar import __version__

    return __version__


def _find() -> Iterator[metadata.EntryPoint]:
    """Entry points to load, each once, although one distribution may be seen twice on the path."""
    limit = os.environ.get(LIMIT_VARIABLE)
    allowed = None if limit is None else {normalized(name) for name in limit.split(",") if name.strip()}
    seen: dict[tuple[str, str], metadata.EntryPoint] = {}
    targets: set[tuple[str, str]] = set()
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        distribution = _distribution_of(entry_point)
        if allowed is not None and not allowed & {distribution, normalized(entry_point.name)}:
            continue
        # One module under two names is one plug-in as well: the first name found stands.
        if (distribution, entry_point.value) not in targets:
            targets.add((distribution, entry_point.value))
            seen.setdefault((distribution, entry_point.name), entry_point)
    yield from (seen[key] for key in sorted(seen))


def _distribution_of(entry_point: metadata.EntryPoint) -> str:
    # A dist-info without METADATA, as an interrupted installation leaves it, has no name.
    name = entry_point.dist.name if entry_point.dist else None
    return normalized(name) if name else "(unnamed distribution)"


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _load(entry_point: metadata.EntryPoint) -> LoadedPlugin:
    version = (entry_point.dist.version if entry_point.dist else None) or "?"
    origin = Origin(_distribution_of(entry_point), version, entry_point.name)
    try:
        plugin = entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # SystemExit at import included: whatever it raises, the others go on
        return _broken(origin, f"cannot be loaded: {type(cause).__name__}: {cause}", cause)
    try:
        return LoadedPlugin(origin, _entries_of(plugin, origin))
    except PluginError as error:
        return LoadedPlugin(origin, error=error)
    except KeyboardInterrupt:
        raise
    except BaseException as cause:
        return _broken(origin, f"failed while registering: {type(cause).__name__}: {cause}", cause)


def _broken(origin: Origin, what: str, cause: BaseException) -> LoadedPlugin:
    error = PluginError(f"plug-in {origin} {' '.join(what.split())}")  # one line, for listings and logs
    error.__cause__ = cause
    return LoadedPlugin(origin, error=error)


def _entries_of(plugin: object, origin: Origin) -> tuple[Entry, ...]:
    manager = pluggy.PluginManager("quasar")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=origin.entry_point)
    except pluggy.PluginValidationError as error:
        raise PluginError(f"plug-in {origin}: {' '.join(str(error).split())}") from error
    _check_hook_names(manager, plugin, origin)
    entries: list[Entry] = []
    for kind, (hook, protocol) in KINDS.items():
        caller = getattr(manager.hook, hook)
        # pluggy drops a result that is None; an implementation without a result forgot its `return`.
        for provided in caller() or [None] * len(caller.get_hookimpls()):
            entries.extend(_checked_entries(kind, hook, protocol, provided, origin))
    return tuple(entries)


def _check_hook_names(manager: pluggy.PluginManager, plugin: object, origin: Origin) -> None:
    hooks = [caller.name for caller in manager.get_hookcallers(plugin) or ()]
    known = [hook for hook, _ in KINDS.values()]
    if not hooks:
        raise PluginError(f"plug-in {origin} implements no hook: mark one of {', '.join(known)} with @quasar.hookimpl")
    for hook in hooks:
        if hook not in known:
            # The prefix that all hooks share would make any name look close.
            bare = {name.removeprefix("quasar_"): name for name in known}
            close = difflib.get_close_matches(hook.removeprefix("quasar_"), bare, n=1)
            hint = f"Did you mean {bare[close[0]]!r}?" if close else f"Hooks: {', '.join(known)}."
            raise PluginError(f"plug-in {origin} implements the unknown hook {hook!r}. {hint}")


def _checked_entries(kind: str, hook: str, protocol: type, provided: object, origin: Origin) -> Iterator[Entry]:
    if not isinstance(provided, Mapping):
        raise PluginError(
            f"plug-in {origin}: {hook} returned {type(provided).__name__}, expected a mapping {{name: factory}}"
        )
    for name, factory in provided.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise PluginError(f"plug-in {origin}: {hook} has the name {name!r}; use letters, digits, '_', '-' and '.'")
        if not (callable(factory) or (isinstance(factory, str) and re.fullmatch(r"[\w.]+:[\w.]+", factory))):
            raise PluginError(
                f"plug-in {origin}: the factory of {kind} {name!r} is {factory!r}, expected a callable or "
                "'package.module:attribute'"
            )
        if inspect.isclass(factory):
            who = f"{kind} {name!r} of plug-in {origin}"
            check_class(protocol, factory, who)
            if kind == "drafter" and hasattr(factory, "bind"):
                check_class(Bindable, factory, who)
        yield Entry(kind, name, factory, origin)
