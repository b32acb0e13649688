"""Third-party packages: each is found, loaded and validated alone, and none takes the others down."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import quasar
from quasar.errors import PluginError, UnknownStrategyError
from quasar.registry.plugins import LIMIT_VARIABLE, LoadedPlugin, load_plugins
from quasar.registry.registry import Registry, default_registry

DRAFTER = """
from quasar import Draft, hookimpl

class Silent:
    needs = frozenset()
    def start(self, prompt_ids, sampling): return self
    def propose(self, max_tokens): return Draft(())
    def commit(self, token_ids, verification): pass
"""

HOOK = """
@hookimpl
def quasar_drafters():
    return {names}
"""


def drafters(*names: str) -> str:
    """The source of a plug-in that provides drafters of these names."""
    return DRAFTER + HOOK.format(names="{" + ", ".join(f"{name!r}: Silent" for name in names) + "}")


class Site:
    """Folders on ``sys.path`` in which plug-ins lie as pip leaves them: a module and a ``*.dist-info``."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = path
        self._monkeypatch = monkeypatch

    def folder(self, name: str) -> Path:
        path = self._path / name
        if not path.exists():
            path.mkdir()
            self._monkeypatch.syspath_prepend(path)
        return path

    def install(
        self,
        distribution: str,
        source: str,
        *,
        entry_points: dict[str, str] | None = None,
        version: str = "1.0",
        folder: str = "site",
        metadata: bool = True,
        requires: tuple[str, ...] = (),
    ) -> None:
        """Install one module, named like the distribution; its entry point is the last word of that name."""
        path, module = self.folder(folder), distribution.replace("-", "_")
        (path / f"{module}.py").write_text(source, encoding="utf-8")
        info = path / f"{module}-{version}.dist-info"
        info.mkdir()
        if metadata:
            text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            text += "".join(f"Requires-Dist: {line}\n" for line in requires)
            (info / "METADATA").write_text(text, encoding="utf-8")
        lines = [f"{name} = {value}" for name, value in (entry_points or {distribution.split("-")[-1]: module}).items()]
        (info / "entry_points.txt").write_text("\n".join(["[quasar]", *lines]), encoding="utf-8")
        importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A place to install into, with nothing limiting what loads."""
    before = set(sys.modules)
    monkeypatch.delenv(LIMIT_VARIABLE)
    yield Site(tmp_path, monkeypatch)
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def loaded(prefix: str = "acme-") -> dict[str, LoadedPlugin]:
    """The plug-ins of these tests by distribution, in the order in which they were loaded."""
    return {p.origin.distribution: p for p in load_plugins() if p.origin.distribution.startswith(prefix)}


def names(plugin: LoadedPlugin) -> list[str]:
    return [entry.name for entry in plugin.entries]


BROKEN = {
    "a missing import": ("import a_module_that_nobody_has", "cannot be loaded: ModuleNotFoundError: No module named"),
    "an import that exits": ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3"),
    "no Python": ("def (", "cannot be loaded: SyntaxError: "),
    "no hook": (DRAFTER, "implements no hook: mark one of quasar_drafters, quasar_verifiers, quasar_quantizers"),
    "a hook that raises": (
        DRAFTER + HOOK.format(names="{'x': 1 / 0}"),
        "failed while registering: ZeroDivisionError: division by zero",
    ),
    "a hook that exits": (DRAFTER + HOOK.format(names="exit(4)"), "failed while registering: SystemExit: 4"),
    "a misspelt hook": (
        drafters("x").replace("quasar_drafters", "quasar_drafter"),
        "implements the unknown hook 'quasar_drafter'. Did you mean 'quasar_drafters'?",
    ),
    "a hook of no known name": (
        drafters("x").replace("quasar_drafters", "quasar_reset_all"),
        "implements the unknown hook 'quasar_reset_all'. Hooks: quasar_drafters, quasar_verifiers",
    ),
    "an unknown argument": (
        drafters("x").replace("quasar_drafters()", "quasar_drafters(model)"),
        "definition: quasar_drafters(model) Argument(s) {'model'} are declared in the hookimpl",
    ),
    "no return": (
        DRAFTER + HOOK.format(names="None"),
        "quasar_drafters returned NoneType, expected a mapping {name: factory}",
    ),
    "a list": (DRAFTER + HOOK.format(names="[Silent]"), "quasar_drafters returned list, expected a mapping"),
    "a number for a factory": (
        DRAFTER + HOOK.format(names="{'x': 5}"),
        "the factory of drafter 'x' is 5, expected a callable or 'package.module:attribute'",
    ),
    "a path without a colon": (
        DRAFTER + HOOK.format(names="{'x': 'acme.Silent'}"),
        "the factory of drafter 'x' is 'acme.Silent', expected a callable or",
    ),
    "a name that no spec string can hold": (
        DRAFTER + HOOK.format(names="{'a:b': Silent}"),
        "quasar_drafters has the name 'a:b'; use letters, digits",
    ),
    "a name that is no text": (DRAFTER + HOOK.format(names="{7: Silent}"), "quasar_drafters has the name 7; use"),
    "a method with an argument too few": (
        drafters("x").replace("start(self, prompt_ids, sampling)", "start(self)"),
        ": Silent.start() cannot be called as Drafter.start(prompt_ids, sampling, target): too many",
    ),
    "a method with an argument too many": (
        drafters("x").replace("start(self, prompt_ids, sampling)", "start(self, prompt_ids, sampling, target, model)"),
        ": Silent.start(prompt_ids, sampling, target, model) cannot be called as Drafter.start(",
    ),
    "an optional method with an argument too few": (
        drafters("x").replace("    def start", "    def bind(self, model): pass\n    def start"),
        ": Silent.bind(model) cannot be called as Bindable.bind(model, tokenizer, calibration): too many positional",
    ),
    "a method of before there was sampling": (
        drafters("x").replace("start(self, prompt_ids, sampling)", "start(self, prompt_ids)"),
        ": Silent.start(prompt_ids) cannot be called as Drafter.start(prompt_ids, sampling, target): too many",
    ),
    "a method that is missing": (
        drafters("x").replace("def start", "def begin"),
        "drafter 'x' of plug-in acme-broken 1.0 [broken]: Silent has no method start(prompt_ids, sampling, target)",
    ),
}


@pytest.mark.parametrize(("source", "fragment"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_kept_with_its_cause_and_the_others_load(site, source, fragment):
    """Whatever it does at import or in its hook, its error names it, and those before and after it are there."""
    site.install("acme-aaa", drafters("first"))
    site.install("acme-broken", source)
    site.install("acme-zzz", drafters("last"))
    plugins = loaded()
    assert names(plugins["acme-aaa"]) == ["first"]
    assert names(plugins["acme-zzz"]) == ["last"]
    broken = plugins["acme-broken"]
    assert broken.entries == ()
    (error,) = broken.errors
    assert isinstance(error, PluginError)
    assert "plug-in acme-broken 1.0 [broken]" in str(error)
    assert fragment in str(error)
    assert "\n" not in str(error)


def test_an_entry_point_to_an_attribute_that_is_not_there_is_broken(site):
    """A wrong attribute is named with its module."""
    site.install("acme-broken", drafters("x"), entry_points={"broken": "acme_broken:nothing"})
    (error,) = loaded()["acme-broken"].errors
    assert "plug-in acme-broken 1.0 [broken] cannot be loaded: AttributeError: " in str(error)
    assert "'acme_broken' has no attribute 'nothing'" in str(error)


def test_a_distribution_without_metadata_does_not_take_the_others_down(site):
    """An interrupted installation leaves a dist-info without METADATA; what it names can still be told."""
    site.install("acme-aaa", drafters("first"))
    site.install("acme-half", "raise ImportError('half installed')", metadata=False)
    (half,) = loaded("(unnamed").values()
    assert "plug-in (unnamed distribution) ? [half] cannot be loaded: ImportError: half installed" in str(
        half.errors[0]
    )
    assert names(loaded()["acme-aaa"]) == ["first"]


@pytest.mark.parametrize(
    ("requirement", "asked"),
    [
        ("quasar-decode<0.1", "<0.1"),
        ("Quasar_Decode (>=99,<100)", "<100,>=99"),
        ("quasar-decode[gguf]>=99", ">=99"),
        ('quasar-decode>=99; python_version >= "3"', ">=99"),
    ],
)
def test_a_plugin_made_for_other_versions_is_not_loaded_and_says_which(site, requirement, asked):
    """What it asks for, what is there, what would do; it is not even imported, and a name of its own raises that."""
    site.install("acme-other", "raise SystemExit('imported')", requires=("attrs", requirement))
    site.install("acme-zzz", drafters("last"))
    plugins = loaded()
    (error,) = plugins["acme-other"].errors
    assert str(error) == (
        f"plug-in acme-other 1.0 [other] needs quasar-decode{asked}; this is quasar-decode {quasar.__version__}: "
        "install a version of acme-other that fits it"
    )
    assert "acme_other" not in sys.modules
    assert names(plugins["acme-zzz"]) == ["last"]
    registry = Registry(load_plugins())
    assert registry.problems() == [str(error)]
    with pytest.raises(PluginError, match="needs quasar-decode"):
        registry.build("drafter", "other")


@pytest.mark.parametrize(
    "requirement",
    [
        "quasar-decode",
        f"quasar-decode>={quasar.__version__}",
        f"quasar-decode=={quasar.__version__}",
        'quasar-decode>=99; extra == "future"',
        'quasar-decode>=99; python_version < "3"',
        "quasar-decode-extras>=99",
        "quasar-decode >= ninety-nine",
    ],
)
def test_a_plugin_that_fits_is_loaded(site, requirement):
    """Also one that names no versions, or names them only for an extra or another Python."""
    site.install("acme-fits", drafters("fine"), requires=(requirement,))
    assert names(loaded()["acme-fits"]) == ["fine"]


def test_an_interrupt_is_no_fault_of_a_plugin(site):
    """Ctrl-C while a plug-in is imported ends the program, as anywhere."""
    site.install("acme-slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_plugins()


def test_asking_for_what_a_broken_plugin_would_provide_raises_its_cause(site):
    """Not "unknown name", but why it is not there, with the original exception chained."""
    site.install("acme-broken", "raise ImportError('libacme.so is too old')")
    registry = Registry(load_plugins())
    with pytest.raises(PluginError, match=r"no drafter named 'broken': plug-in acme-broken .* too old") as caught:
        registry.build("drafter", "broken")
    assert isinstance(caught.value.__cause__.__cause__, ImportError)


def test_an_unknown_name_mentions_what_could_not_be_loaded(site):
    """The strategy asked for may be in a broken plug-in of another name; one word each, after the answer."""
    site.install("acme-broken", "raise ImportError('libacme.so is too old')")
    site.install("acme-faulty", "raise ImportError('libacme.so is too new')")
    registry = Registry(load_plugins())
    with pytest.raises(UnknownStrategyError) as caught:
        registry.build("drafter", "ngrm")
    start, _, rest = str(caught.value).partition(" Installed: ")
    assert start == "no drafter named 'ngrm'. Did you mean 'ngram'?"
    names, _, broken = rest.partition(" Not loaded: ")
    assert names.removesuffix(".").split(", ") == [entry.name for entry in registry.entries("drafter")]
    assert broken == "acme-broken, acme-faulty; 'quasar plugins' says why."


FAULTS = """
@hookimpl
def quasar_drafters():
    return {'good': Silent, 'no name': Silent, 'five': 5}

@hookimpl
def quasar_policies(model):
    return {}

@hookimpl
def quasar_kernel():
    return {}

@hookimpl
def quasar_verifiers():
    return 1 / 0

@hookimpl
def quasar_quantizers():
    return {'fine': 'acme_partly:Quantizer'}
"""


def test_what_is_sound_in_a_faulty_plugin_stays_and_every_fault_is_told(site):
    """One strategy that does not fit must not take the others of its module away, nor hide the next fault."""
    site.install("acme-partly", DRAFTER + FAULTS)
    registry = Registry(load_plugins())
    (plugin,) = (p for p in registry.plugins if p.origin.distribution == "acme-partly")
    assert [(entry.kind, entry.name) for entry in plugin.entries] == [("drafter", "good"), ("quantizer", "fine")]
    assert type(registry.build("drafter", "good")).__name__ == "Silent"
    fragments = ["the name 'no name'", "drafter 'five' is 5", "ZeroDivisionError", "'model'", "hook 'quasar_kernel'"]
    assert len(registry.problems()) == len(plugin.errors) == len(fragments)
    for fragment in fragments:
        assert sum(fragment in problem for problem in registry.problems()) == 1, fragment
    with pytest.raises(PluginError, match=r"no drafter named 'five': plug-in acme-partly .* is 5, expected a callable"):
        registry.build("drafter", "five")


def test_each_problem_is_one_warning(site, caplog):
    """A broken plug-in and a name taken twice are said once, in a line each, and nothing else is."""
    site.install("acme-broken", "raise ImportError('libacme.so\\nis too old')")
    site.install("acme-fine", drafters("fine"))
    site.install("acme-twin", drafters("ngram"))
    default_registry.__wrapped__()
    lines = [record.getMessage() for record in caplog.records if "acme" in record.getMessage()]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(lines)
    assert len(lines) == 2
    assert "acme-broken 1.0 [broken] cannot be loaded: ImportError: libacme.so is too old" in lines[0]
    assert lines[1].startswith("drafter 'ngram' of acme-twin 1.0 [twin] is ignored")


def test_a_factory_given_as_a_path_is_imported_only_when_it_is_asked_for(site):
    """Declaring costs nothing: the module behind a path may be missing without anybody noticing, until it is wanted."""
    site.install("acme-lazy", drafters("fine").replace("{", "{'heavy': 'acme_heavy.inside:Thing', "))
    registry = Registry(load_plugins())
    assert registry.problems() == []
    assert type(registry.build("drafter", "fine")).__name__ == "Silent"
    with pytest.raises(PluginError, match=r"drafter 'heavy' of acme-lazy .* acme_heavy.inside:Thing cannot be"):
        registry.build("drafter", "heavy")
    assert "acme_heavy" not in sys.modules


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_provided_twice_goes_to_the_first_distribution_and_both_are_named(site, order):
    """The winner does not depend on where or when things were installed, and whoever comes later still loads."""
    distributions = ["acme-one", "acme-two"][::order]
    for folder, distribution in enumerate(distributions):
        site.install(distribution, drafters("same"), folder=f"site{folder}")
    site.install("acme-zzz", drafters("third"), folder="site2")
    registry = Registry(load_plugins())
    assert registry.problems() == [
        "drafter 'same' of acme-two 1.0 [two] is ignored: acme-one 1.0 [one] provides that name already"
    ]
    assert type(registry.build("drafter", "same")).__module__ == "acme_one"
    assert type(registry.build("drafter", "third")).__module__ == "acme_zzz"


def test_a_builtin_is_not_replaced_by_a_plugin(site):
    """The built-in keeps its name; what is ignored is told."""
    site.install("acme-ngram", drafters("ngram", "other"))
    registry = Registry(load_plugins())
    assert type(registry.build("drafter", "ngram")).__name__ == "NgramDrafter"
    assert type(registry.build("drafter", "other")).__name__ == "Silent"
    assert registry.problems()[0].startswith("drafter 'ngram' of acme-ngram 1.0 [ngram] is ignored: quasar-decode ")


def test_the_same_name_for_two_kinds_is_no_clash(site):
    """A drafter and a policy may be called alike."""
    policy = "\n@hookimpl\ndef quasar_policies():\n    return {'same': 'acme_both:Policy'}\n"
    site.install("acme-both", drafters("same") + policy)
    registry = Registry(load_plugins())
    assert registry.problems() == []
    assert [e.kind for e in registry.entries() if e.name == "same"] == ["drafter", "policy"]


def test_a_distribution_seen_twice_on_the_path_is_one_plugin(site):
    """An editable and an installed copy: the first on the path counts, as for import, and nothing is reported."""
    site.install("acme-twice", drafters("old"), version="1.0", folder="later")
    site.install("acme-twice", drafters("new"), version="2.0", folder="first")
    registry = Registry(load_plugins())
    assert registry.problems() == []
    (plugin,) = (p for p in registry.plugins if p.origin.distribution == "acme-twice")
    assert (plugin.origin.version, names(plugin)) == ("2.0", ["new"])


def test_one_module_under_two_entry_points_is_one_plugin(site):
    """Its strategies do not clash with themselves."""
    site.install("acme-alias", drafters("x"), entry_points={"alias": "acme_alias", "nickname": "acme_alias"})
    registry = Registry(load_plugins())
    assert registry.problems() == []
    assert [p.origin.entry_point for p in registry.plugins if p.origin.distribution == "acme-alias"] == ["alias"]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("", []),
        (" , ", []),
        ("one", ["acme-one"]),
        ("acme-two", ["acme-two"]),
        ("Acme_Two", ["acme-two"]),
        ("two, acme-one", ["acme-one", "acme-two"]),
        ("nobody", []),
    ],
)
def test_the_environment_limits_which_plugins_load(site, monkeypatch, limit, expected):
    """QUASAR_PLUGINS names entry points or distributions; what it does not name is not even imported."""
    site.install("acme-one", drafters("one"))
    site.install("acme-two", drafters("two"))
    site.install("acme-zzz", "raise SystemExit('imported')")
    monkeypatch.setenv(LIMIT_VARIABLE, limit)
    builtins, *others = load_plugins()
    assert builtins.origin.distribution == "quasar-decode"
    assert [plugin.origin.distribution for plugin in others] == expected


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_plugins_does_not_depend_on_the_path(site, order):
    """Built-ins, then by distribution and entry point."""
    for folder, distribution in enumerate(["acme-b", "acme-a", "acme-c"][::order]):
        module = distribution.replace("-", "_")
        source = drafters(distribution) + "\nclass Other:\n    quasar_drafters = staticmethod(quasar_drafters)\n"
        points = {"z": f"{module}:Other", "m": module}
        site.install(distribution, source, entry_points=points, folder=f"site{folder}")
    builtins, *others = load_plugins()
    assert builtins.origin.entry_point == "builtins"
    assert [str(p.origin) for p in others if p.origin.distribution.startswith("acme-")] == [
        f"acme-{letter} 1.0 [{name}]" for letter in "abc" for name in "mz"
    ]


def test_tests_see_no_third_party_plugin_unless_they_ask():
    """What happens to be installed must not decide whether a test passes."""
    assert [plugin.origin.distribution for plugin in load_plugins()] == ["quasar-decode"]
