"""Third-party packages: find, then load, then validate; one broken package never takes the others down.

Finding reads metadata only, and a package that was made for other versions of Quasar is not loaded. Loading imports
the module an entry point names; whatever it raises is kept as the cause. Validating registers each of its hooks with a
pluggy manager of its own, so that each result and each error has an origin: a hook that does not exist, an argument it
does not take, a value that is no ``{name: factory}``. What is sound beside a fault is kept, and every fault is told.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import attrs
import pluggy

from quasar.errors import PluginError
from quasar.protocols import AcceptancePolicy, Bindable, CheckpointFormat, Drafter, Kernel, Quantizer, Verifier
from quasar.registry import builtins, hookspecs
from quasar.registry.hookspecs import Factory
from quasar.registry.requirements import OWN_DISTRIBUTION, misfit
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
"""The kinds of strategies: the hook that provides them, and their protocol."""

HOOKS: Mapping[str, str] = {hook: kind for kind, (hook, _) in KINDS.items()} | {"quasar_commands": "command"}
"""All hooks, and the kind of what each provides. A command is no strategy; the command line looks at what it gets."""


@attrs.frozen(order=True)
class Origin:
    """Where a strategy or a command comes from: a distribution, its version and the entry point in it."""

    distribution: str
    version: str
    entry_point: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} [{self.entry_point}]"


@attrs.frozen
class Entry:
    """One strategy or command that a plug-in provides."""

    kind: str
    name: str
    factory: Factory
    origin: Origin

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.origin}"


@attrs.frozen
class LoadedPlugin:
    """One plug-in: what it provides, and what is wrong with it."""

    origin: Origin
    entries: tuple[Entry, ...] = ()
    errors: tuple[PluginError, ...] = ()


def load_plugins() -> tuple[LoadedPlugin, ...]:
    """The built-in strategies first, then every installed plug-in in the order of (distribution, entry point).

    The environment variable ``QUASAR_PLUGINS`` limits third-party plug-ins to the entry points or distributions it
    names, separated by commas; set to nothing, it lets none load.
    """
    own = Origin(OWN_DISTRIBUTION, _own_version(), "builtins")
    return (_examined(builtins, own), *map(_load, _find()))


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
    if reason := misfit(entry_point.dist.requires if entry_point.dist else None, _own_version()):
        # Not loaded: what it imports, or what it implements, may be another thing by now.
        message = f"plug-in {origin} {reason}: install a version of {origin.distribution} that fits it"
        return LoadedPlugin(origin, errors=(PluginError(message),))
    try:
        plugin = entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # SystemExit at import included: whatever it raises, the others go on
        return LoadedPlugin(origin, errors=(_fault(origin, "cannot be loaded", cause),))
    return _examined(plugin, origin)


def _examined(plugin: object, origin: Origin) -> LoadedPlugin:
    found = list(_findings(plugin, origin))
    errors = tuple(finding for finding in found if isinstance(finding, PluginError))
    return LoadedPlugin(origin, tuple(finding for finding in found if isinstance(finding, Entry)), errors)


def _fault(origin: Origin, what: str, cause: BaseException) -> PluginError:
    message = f"plug-in {origin} {what}: {type(cause).__name__}: {cause}"
    error = PluginError(" ".join(message.split()))  # one line, for listings and logs
    error.__cause__ = cause
    return error


def _findings(plugin: object, origin: Origin) -> Iterator[Entry | PluginError]:
    """What a plug-in provides and each fault, kind by kind in the order of the hooks."""
    known = list(HOOKS)
    try:
        implemented = _implementations(plugin)
    except KeyboardInterrupt:
        raise
    except BaseException as cause:
        yield _fault(origin, "failed while registering", cause)
        return
    if not implemented:
        yield PluginError(f"plug-in {origin} implements no hook: mark one of {', '.join(known)} with @quasar.hookimpl")
    for hook in sorted(implemented, key=lambda hook: known.index(hook) if hook in known else len(known)):
        if hook not in known:
            yield _unknown_hook(hook, known, origin)
            continue
        try:
            provided = _provided(hook, implemented[hook], origin)
        except KeyboardInterrupt:
            raise
        except PluginError as error:
            yield error
        except BaseException as cause:
            yield _fault(origin, "failed while registering", cause)
        else:
            yield from _entries(HOOKS[hook], hook, provided, origin)


def _implementations(plugin: object) -> dict[str, Any]:
    """The functions that are marked as hooks, by the hook's name."""
    reader = pluggy.PluginManager("quasar")
    names = [(name, reader.parse_hookimpl_opts(plugin, name)) for name in dir(plugin)]
    return {options.get("specname") or name: getattr(plugin, name) for name, options in names if options is not None}


def _provided(hook: str, implementation: Any, origin: Origin) -> object:
    """What a hook returns; ``None`` where it forgot its ``return``."""
    manager = pluggy.PluginManager("quasar")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(SimpleNamespace(**{hook: implementation}), name=origin.entry_point)
    except pluggy.PluginValidationError as error:
        raise PluginError(f"plug-in {origin}: {' '.join(str(error).split())}") from error
    results = getattr(manager.hook, hook)()
    return results[0] if results else None


def _unknown_hook(hook: str, known: list[str], origin: Origin) -> PluginError:
    # The prefix that all hooks share would make any name look close.
    bare = {name.removeprefix("quasar_"): name for name in known}
    close = difflib.get_close_matches(hook.removeprefix("quasar_"), bare, n=1)
    hint = f"Did you mean {bare[close[0]]!r}?" if close else f"Hooks: {', '.join(known)}."
    return PluginError(f"plug-in {origin} implements the unknown hook {hook!r}. {hint}")


def _entries(kind: str, hook: str, provided: object, origin: Origin) -> Iterator[Entry | PluginError]:
    if not isinstance(provided, Mapping):
        yield PluginError(
            f"plug-in {origin}: {hook} returned {type(provided).__name__}, expected a mapping {{name: factory}}"
        )
        return
    for name, factory in provided.items():
        try:
            _check_entry(kind, hook, name, factory, origin)
        except PluginError as error:
            yield error
        else:
            yield Entry(kind, name, factory, origin)


def _check_entry(kind: str, hook: str, name: object, factory: object, origin: Origin) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise PluginError(f"plug-in {origin}: {hook} has the name {name!r}; use letters, digits, '_', '-' and '.'")
    is_path = isinstance(factory, str) and re.fullmatch(r"[\w.]+:[\w.]+", factory)
    if kind == "command" and not (is_path or hasattr(factory, "make_context")):  # click is not imported for that
        raise PluginError(
            f"plug-in {origin}: {kind} {name!r} is {factory!r}, expected a click.Command or 'package.module:attribute'"
        )
    if not (is_path or callable(factory)):
        raise PluginError(
            f"plug-in {origin}: the factory of {kind} {name!r} is {factory!r}, expected a callable or "
            "'package.module:attribute'"
        )
    if inspect.isclass(factory) and kind in KINDS:
        who = f"{kind} {name!r} of plug-in {origin}"
        check_class(KINDS[kind][1], factory, who)
        if kind == "drafter" and hasattr(factory, "bind"):
            check_class(Bindable, factory, who)
