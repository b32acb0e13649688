"""From a spec string such as ``"ngram:k=5,max_n=3"`` to a strategy, through whatever is installed."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import attrs

from quasar.errors import InvalidRequestError, PluginError, QuasarError, UnknownStrategyError, UnsupportedModelError
from quasar.options import did_you_mean
from quasar.protocols import Bindable, ChecksSampling, Describable, Invariance, Ranked, Strictable
from quasar.registry.builtins import FUNCTION_DRAFTER
from quasar.registry.importing import resolve
from quasar.registry.plugins import HOOKS, KINDS, Entry, LoadedPlugin, Origin, load_plugins
from quasar.registry.signatures import check_function, check_signatures, offers
from quasar.registry.spec import Option, parse_spec

logger = logging.getLogger("quasar")

AUTO = "auto"
"""In place of a spec string: what is best for the model and the machine."""


@attrs.frozen
class Shadowed:
    """A strategy that cannot be had by its name, because another one took the name first."""

    entry: Entry
    winner: Origin

    def __str__(self) -> str:
        return f"{self.entry} is ignored: {self.winner} provides that name already"


class Registry:
    """All that loaded plug-ins provide. On a name clash the earlier plug-in wins: built-ins, then by name."""

    def __init__(self, plugins: Iterable[LoadedPlugin]) -> None:
        self.plugins = tuple(plugins)
        self.shadowed: list[Shadowed] = []
        self._entries: dict[tuple[str, str], Entry] = {}
        for entry in (entry for plugin in self.plugins for entry in plugin.entries):
            winner = self._entries.setdefault((entry.kind, entry.name), entry)
            if winner is not entry:
                self.shadowed.append(Shadowed(entry, winner.origin))

    def entries(self, kind: str | None = None) -> list[Entry]:
        """What can be had by name, sorted by kind (in the order of the hooks) and name."""
        order = list(HOOKS.values())
        found = [entry for entry in self._entries.values() if kind in (None, entry.kind)]
        return sorted(found, key=lambda entry: (order.index(entry.kind), entry.name))

    def problems(self) -> list[str]:
        """One line for each fault of a plug-in and each name that is provided twice."""
        faults = [str(error) for plugin in self.plugins for error in plugin.errors]
        return faults + [str(shadowed) for shadowed in self.shadowed]

    def build(self, kind: str, spec: object, *arguments: Any) -> Any:
        """Make a strategy from a spec string, or check and adapt one that was passed as an object.

        Args:
            kind: A key of :data:`quasar.registry.plugins.KINDS`.
            spec: ``"name:option=value,…"``, or a strategy; a plain function counts as a drafter.
            arguments: What the factory takes before its options (a verifier: the model).

        Raises:
            UnknownStrategyError: Nothing installed has that name.
            InvalidRequestError: An option that the factory does not take, or a value that it refuses.
            PluginError: The factory failed, or what it made does not fit the protocol.
        """
        if not isinstance(spec, str):
            return _checked(kind, spec, f"the {kind} {getattr(spec, '__name__', None) or _one_line(spec)}")
        factory, options, who = self._prepare(kind, spec, len(arguments))
        with _refusals(who, spec):
            strategy = factory(*arguments, **options)
        return _checked(kind, strategy, who)

    def check_spec(self, kind: str, spec: object) -> None:
        """Raise what :meth:`build` would raise for the name and the options of a spec string, without building.

        For a kind whose factory takes one argument before its options (a verifier: the model). Values are checked
        where the factory has the function of :class:`quasar.protocols.ChecksOptions`.
        """
        if isinstance(spec, str):
            factory, options, who = self._prepare(kind, spec, 1)
            if (check := getattr(factory, "check_options", None)) is not None:
                with _refusals(who, spec):
                    check(**options)

    def check_name(self, kind: str, spec: object) -> None:
        """Raise what :meth:`build` would raise for the name in a spec string. Nothing heavy is imported for that."""
        if isinstance(spec, str):
            self.entry(kind, parse_spec(spec)[0])

    def required_options(self, kind: str, name: str) -> list[str]:
        """Options that the factory of that name has no default for."""
        entry = self.entry(kind, name)
        return _required(_options_of(resolve(entry.factory, str(entry)), int(kind == "verifier")))

    def check_verifier(self, choice: object) -> None:
        """Check what verifies a model that is not there yet: a spec string, or a function from it to a Verifier."""
        if choice == AUTO:
            return
        if not isinstance(choice, str) and not callable(choice):
            raise InvalidRequestError(
                f"verifier={type(choice).__name__} object: give a spec string, or a function from the quantized "
                "model to a Verifier; a Verifier that exists already goes to Pipeline(verifier, tokenizer)"
            )
        self.check_spec("verifier", choice)

    def resolve_verifier(self, choice: Any, model: Any) -> Any:
        """The choice; for ``"auto"`` the name of the fastest verifier that does not refuse the model.

        Raises:
            UnsupportedModelError: Each refuses; the message has all their reasons.
        """
        if choice != AUTO:
            return choice
        reasons = []
        for name, factory in self._ranked_verifiers():
            reason = factory.refuses(model)
            if reason is None:
                return name
            reasons.append(f"{name}: {reason}")
        raise UnsupportedModelError(f"no verifier runs a {type(model).__name__}: {'; '.join(reasons)}")

    def _ranked_verifiers(self) -> list[tuple[str, Ranked]]:
        """Factories that take part in ``"auto"``, fastest first; one that cannot be imported is logged and left out."""
        ranked: list[tuple[str, Any]] = []
        for entry in self.entries("verifier"):
            try:
                factory = resolve(entry.factory, str(entry))
            except PluginError as error:
                logger.warning(error)
                continue
            if offers(Ranked, factory, str(entry)):
                ranked.append((entry.name, factory))
        return sorted(ranked, key=lambda named: -named[1].speed)

    def build_verifier(self, choice: Any, model: Any) -> Any:
        """The Verifier over ``model``, by a choice that :meth:`check_verifier` has passed."""
        choice = self.resolve_verifier(choice, model)
        return self.build("verifier", choice if isinstance(choice, str) else choice(model), model)

    def _prepare(self, kind: str, spec: str, n_arguments: int) -> tuple[Callable[..., Any], dict[str, Option], str]:
        """The factory, the options that it takes, and how to call the strategy in a message."""
        name, options = parse_spec(spec)
        entry = self.entry(kind, name)
        who = str(entry)
        factory = resolve(entry.factory, who)
        _check_options(factory, options, n_arguments, who)
        return factory, options, who

    def entry(self, kind: str, name: str) -> Entry:
        """What has that name.

        Raises:
            UnknownStrategyError: Nothing installed has it.
            PluginError: A plug-in that is broken may have meant to provide it.
        """
        if (entry := self._entries.get((kind, name))) is not None:
            return entry
        broken = [plugin for plugin in self.plugins if plugin.errors]
        for error in _faults_about(kind, name, broken):
            raise PluginError(f"no {kind} named {name!r}: {error}") from error
        names = [entry.name for entry in self.entries(kind)]
        faulty = ", ".join(sorted({plugin.origin.distribution for plugin in broken}))
        also = f" Not loaded: {faulty}; 'quasar plugins' says why." if broken else ""
        raise UnknownStrategyError(
            f"no {kind} named {name!r}.{did_you_mean(name, names)} Installed: {', '.join(names)}.{also}"
        )


@functools.cache
def default_registry() -> Registry:
    """The registry of everything installed, loaded once per process; problems are logged as warnings, one line each."""
    registry = Registry(load_plugins())
    for problem in registry.problems():
        logger.warning(problem)
    return registry


def _faults_about(kind: str, name: str, broken: Iterable[LoadedPlugin]) -> Iterator[PluginError]:
    """Why a strategy may be missing: it is at fault itself, or the whole plug-in that is called so."""
    for plugin in broken:
        named = name in (plugin.origin.entry_point, plugin.origin.distribution) and not plugin.entries
        yield from (error for error in plugin.errors if named or f"{kind} {name!r}" in str(error))


@contextmanager
def _refusals(who: str, spec: str) -> Iterator[None]:
    """Say of what a factory raises whose fault it is, and who raised it."""
    try:
        yield
    except QuasarError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{who} refused {spec!r}: {error}") from error
    except Exception as error:
        raise PluginError(f"{who} failed to start: {type(error).__name__}: {error}") from error


def _one_line(value: object) -> str:
    return f"{' '.join(repr(value).split()):.80}"


def _check_options(factory: Callable[..., Any], options: Mapping[str, Option], n_arguments: int, who: str) -> None:
    parameters = _options_of(factory, n_arguments)
    if missing := [name for name in _required(parameters) if name not in options]:
        raise InvalidRequestError(f"{who} needs the option {missing[0]!r}; write NAME:{missing[0]}=…")
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for option in options:
        if option not in known:
            names = ", ".join(known) or "none"
            raise InvalidRequestError(
                f"{who} has no option {option!r}; its options: {names}.{did_you_mean(option, known)}"
            )


def _options_of(factory: Callable[..., Any], n_arguments: int) -> list[inspect.Parameter]:
    """What a factory takes by name, after as many arguments; anything, if it does not say."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())[n_arguments:]
    except ValueError:
        return [inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)]
    return [parameter for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]


def _required(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


def _checked(kind: str, strategy: object, who: str) -> Any:
    protocol = KINDS[kind][1]
    if kind == "drafter" and callable(strategy) and not hasattr(strategy, "start"):
        check_function(strategy, lambda token_ids, k: (), who)
        return resolve(FUNCTION_DRAFTER, who)(strategy)
    check_signatures(protocol, strategy, who)
    for optional in _OPTIONAL.get(kind, ()):
        offers(optional, strategy, who)
    _check_declared(kind, strategy, who)
    return strategy


_OPTIONAL: Mapping[str, tuple[type, ...]] = {
    "drafter": (Bindable, Describable),
    "verifier": (Strictable, Describable),
    "policy": (ChecksSampling,),
}
"""What a strategy of a kind may offer besides; checked where it is there."""


def _check_declared(kind: str, strategy: Any, who: str) -> None:
    """Attributes that a loop reads later; a value outside their type would surface far from who set it."""
    if kind == "verifier" and strategy.invariance not in (known := get_args(Invariance)):
        raise PluginError(f"{who} declares invariance={strategy.invariance!r}; choose one of {', '.join(known)}")
    if kind == "verifier":
        listed = strategy.approximations
        if not isinstance(listed, tuple) or not all(isinstance(one, str) and one for one in listed):
            raise PluginError(f"{who} declares approximations={listed!r}; give a tuple of texts, maybe empty")
    if kind == "drafter":
        needs = strategy.needs
        if not isinstance(needs, frozenset) or not all(isinstance(name, str) for name in needs):
            raise PluginError(
                f"{who} declares needs={needs!r}; give a frozenset of features, maybe empty, as in {{'hidden:-1'}}"
            )
    if kind == "policy":
        for name in ("lossless", "drafter_invariant", "uses_draft_probs"):
            if not isinstance(value := getattr(strategy, name), bool):
                raise PluginError(f"{who} declares {name}={value!r}; give True or False")
