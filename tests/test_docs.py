"""The documentation says what the code says: signatures, names, options, keys; and its snippets run."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from quasar import GenerationResult, Pipeline, protocols
from quasar.commands import cli, console
from quasar.drafters.model import ModelDrafter
from quasar.drafters.nested import CascadeDrafter
from quasar.drafters.ngram import NgramDrafter
from quasar.loop.sampling import Sampling
from quasar.loop.stats import DecodeStats
from quasar.pipeline.guarantees import guarantee_of, guarantee_of_reference
from quasar.pipeline.plan import Choices
from quasar.pipeline.request import Request
from quasar.policies.coupled import CoupledPolicy
from quasar.policies.greedy import GreedyPolicy
from quasar.policies.margin import MarginPolicy
from quasar.policies.rejection import RejectionPolicy
from quasar.policies.typical import TypicalPolicy
from quasar.quantizers.gguf.quantizer import GgufQuantizer
from quasar.quantizers.hqq import HqqQuantizer
from quasar.quantizers.w8a8.quantizer import W8A8Quantizer
from quasar.registry import builtins, hookspecs, plugins, registry
from quasar.registry.signatures import check_class
from quasar.registry.spec import parse_spec
from quasar.testing import check_drafter, check_policy, check_quantizer, check_verifier
from quasar.types import TokenLogprobs
from test_testing import DRAFTERS, POLICIES, QUANTIZERS, VERIFIERS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "quasar"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
EXAMPLE = ROOT / "plugins" / "quasar-example"
CODE = re.compile(r"`([^`]+)`")


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def prose_of(page: str) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def headings(page: str) -> list[str]:
    """The headings that are code and nothing else, without the backticks."""
    return re.findall(r"^#+ `([^`]+)`$", prose_of(page), flags=re.MULTILINE)


def snippets(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def section(page: str, heading: str) -> str:
    """What stands below a heading, down to the next one."""
    parts = re.split(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


def first_column(page: str, heading: str) -> list[str]:
    """The code in the first cells of the tables below a heading."""
    return re.findall(r"^\| `([^`]+)` \|", section(page, heading), flags=re.MULTILINE)


def signature(function, *, bound: bool = True) -> str:
    """As a reader wants it: without annotations, and without ``self`` where that is not passed."""
    shown = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in shown.parameters.values()]
    return str(shown.replace(parameters=parameters[not bound :], return_annotation=inspect.Signature.empty))


def numbered(pages: list[str]):
    """Each snippet of the pages, as a parameter named after its page and place."""
    return [
        pytest.param(page, i, id=f"{page}-{i}") for page in pages for i, _ in enumerate(snippets(DOCS / page), start=1)
    ]


def run(page: str, i: int) -> dict[str, object]:
    namespace: dict[str, object] = {"__name__": "snippet"}
    snippet = snippets(DOCS / page)[i - 1]
    if "constraints" in snippet:
        pytest.importorskip("llguidance")  # an extra
    exec(compile(snippet, f"{page}, snippet {i}", "exec"), namespace)
    return namespace


HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, "quasar_spec")]
PROTOCOLS = [p for p in vars(protocols).values() if inspect.isclass(p) and p.__module__ == protocols.__name__]


def test_every_hook_has_a_heading_with_its_signature():
    assert HOOKS
    assert headings("hooks.md") == [f"{hook}{signature(getattr(hookspecs, hook))}" for hook in HOOKS]


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_of_a_hook_declares_it(hook):
    namespace = run("hooks.md", HOOKS.index(hook) + 1)
    assert hasattr(namespace[hook], "quasar_impl")
    provided = namespace[hook]()
    assert len(provided) == 1
    assert all(isinstance(name, str) and isinstance(factory, str) for name, factory in provided.items())


def test_every_protocol_and_each_of_its_methods_has_a_heading_with_its_signature():
    expected = set()
    for protocol in PROTOCOLS:
        expected.add(protocol.__name__)
        for name, member in vars(protocol).items():
            if inspect.isfunction(member) and member.__module__ == protocols.__name__:
                expected.add(f"{protocol.__name__}.{name}{signature(member, bound=False)}")
    assert len(expected) > 2 * len(PROTOCOLS) - 1
    assert set(headings("protocols.md")) == expected


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_the_attributes_of_a_protocol_are_listed(protocol):
    listed = re.findall(r"^- `(\w+)`:", section("protocols.md", f"`{protocol.__name__}`"), flags=re.MULTILINE)
    assert listed == list(protocol.__annotations__)


def test_structure_names_every_module_once():
    modules = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    assert sorted(first_column("structure.md", "`src/quasar`")) == modules


def test_structure_names_every_plugin_of_the_repository():
    for package in (ROOT / "plugins").glob("*/pyproject.toml"):
        assert f"`plugins/{package.parent.name}`" in text_of("structure.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page):
    for name in CODE.findall(prose_of(page)):
        if re.fullmatch(r"[\w/.-]*/[\w.-]+\.py", name):
            assert (ROOT / name).is_file() or (SOURCE / name).is_file(), name


def test_every_page_is_in_the_table_of_contents():
    listed = re.findall(r"^```\{toctree\}\n(.*?)^```$", text_of("index.md"), flags=re.MULTILINE | re.DOTALL)
    pages = [line for block in listed for line in block.splitlines() if line and not line.startswith(":")]
    assert sorted(f"{page}.md" for page in pages) == [page for page in PAGES if page != "index.md"]


@pytest.mark.parametrize("path", [ROOT / "README.md", *(DOCS / page for page in PAGES)], ids=lambda path: path.name)
def test_the_python_snippets_of_a_page_compile(path):
    for i, snippet in enumerate(snippets(path), start=1):
        compile(snippet, f"{path.name}, snippet {i}", "exec")


@pytest.mark.parametrize(("page", "i"), numbered(["writing-plugins.md", "protocols.md", "python.md", "testing.md"]))
def test_a_snippet_runs(page, i, capsys):
    run(page, i)


def test_writing_plugins_teaches_every_kind():
    """Each kind has a snippet with its hook, and the classes that the hooks return fit their protocols."""
    taught = set()
    for i, snippet in enumerate(snippets(DOCS / "writing-plugins.md"), start=1):
        if "@hookimpl" not in snippet:
            continue
        namespace = run("writing-plugins.md", i)
        for hook, kind in plugins.HOOKS.items():
            for name, factory in namespace.get(hook, dict)().items():
                taught.add(kind)
                if inspect.isclass(factory):
                    check_class(plugins.KINDS[kind][1], factory, name)
    assert taught == set(plugins.HOOKS.values())


def test_the_example_plugin_is_included_whole_and_short():
    files = [EXAMPLE / "src" / "quasar_example.py", EXAMPLE / "pyproject.toml"]
    included = re.findall(r"^```\{literalinclude\} (\S+)\n(.*?)^```$", text_of("writing-plugins.md"), re.M | re.S)
    assert [(DOCS / path).resolve() for path, _ in included] == files
    for _, options in included:
        assert {line.split()[0] for line in options.splitlines()} == {":language:", ":caption:"}, "cuts the file"
    assert len(files[0].read_text(encoding="utf-8").splitlines()) <= 40


BROKEN = {
    "the module raises when imported": "import a_module_that_is_not_installed",
    "the package was made for other versions": "",
    "a hook's name is misspelt": "import quasar\n@quasar.hookimpl\ndef quasar_drafter(): return {}",
    "no function is marked with `hookimpl`": "def quasar_drafters(): return {}",
    "a method has other arguments": (
        "import quasar\nclass Fast:\n    def start(self): pass\n"
        "@quasar.hookimpl\ndef quasar_drafters(): return {'fast': Fast}"
    ),
    "the name is taken": "import quasar\n@quasar.hookimpl\ndef quasar_drafters(): return {'ngram': 'a_module:Fast'}",
}


def test_the_faults_of_a_plugin_show_as_the_page_says(tmp_path, monkeypatch):
    rows = re.findall(r"^\| (.+) \| ``(.+)`` \|$", section("writing-plugins.md", "When something is wrong"), re.M)
    assert [did for did, _ in rows] == list(BROKEN)
    monkeypatch.setenv("QUASAR_PLUGINS", "foo")
    for number, (did, printed) in enumerate(rows):
        place = tmp_path / str(number)
        info = place / "quasar_foo-0.1.0.dist-info"
        info.mkdir(parents=True)
        needed = "<0.2" if did == "the package was made for other versions" else ""
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: quasar-foo\nVersion: 0.1.0\nRequires-Dist: quasar-decode{needed}\n"
        )
        (info / "entry_points.txt").write_text(f"[quasar]\nfoo = quasar_foo_{number}\n")
        (place / f"quasar_foo_{number}.py").write_text(BROKEN[did])
        with monkeypatch.context() as patch:
            patch.syspath_prepend(place)
            (problem,) = registry.Registry(plugins.load_plugins()).problems()
        status, _, message = printed.partition(": ")
        assert status == ("shadowed" if did == "the name is taken" else "broken")
        assert problem == message or (message.endswith("…") and problem.startswith(message[:-1])), problem


@pytest.mark.parametrize(
    ("command", "heading"), [("generate", "`quasar generate PROMPT`"), ("plugins", "`quasar plugins`")]
)
def test_the_options_of_a_command_are_those_of_its_help(command, heading):
    shown = CliRunner().invoke(cli.cli, [command, "--help"]).output
    options = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", shown, flags=re.MULTILINE)
    assert "--json" in options
    assert first_column("cli.md", heading) == options


def test_every_command_has_a_heading():
    named = {heading.split()[1] for heading in headings("cli.md")}
    assert named == set(builtins.quasar_commands())


def test_the_json_keys_of_generate():
    result = GenerationResult("", (), "eos", "", {}, logprobs=(TokenLogprobs(-0.5, {7: -0.5}),))
    whole = console.result_as_json(result, result, {})
    assert first_column("cli.md", "JSON of `generate`") == list(whole)
    for part in (whole["reference"], whole["logprobs"][0]):
        assert all(f"`{key}`" in section("cli.md", "JSON of `generate`") for key in part)
    without = console.result_as_json(attrs.evolve(result, logprobs=None), None, {})
    assert [key for key in whole if key not in without] == ["logprobs", "reference"]


def test_the_json_keys_of_plugins():
    rows = json.loads(CliRunner().invoke(cli.cli, ["plugins", "--json"]).stdout)
    assert first_column("cli.md", "JSON of `plugins`") == list(rows[0])


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Stats", list(DecodeStats().as_dict())),
        ("Result", [field.name for field in attrs.fields(GenerationResult)]),
        ("Settings", [field.name for field in attrs.fields(Request)]),
        ("Choices", list(Choices.__annotations__)),
    ],
)
def test_a_table_of_python_md_has_the_names_of_the_code(heading, names):
    assert first_column("python.md", heading) == names


def test_the_settings_have_the_defaults_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section("python.md", "Settings"), flags=re.MULTILINE)
    assert {name: eval(default) for name, default in rows} == attrs.asdict(Request())


@pytest.mark.parametrize(
    ("row", "factory"),
    [
        ("drafter `ngram`", NgramDrafter),
        ("drafter `nested`", CascadeDrafter),
        ("quantizer `w8a8`", W8A8Quantizer),
        ("quantizer `gguf`", GgufQuantizer),
        ("quantizer `hqq`", HqqQuantizer),
        ("policy `margin`", MarginPolicy),
        ("policy `typical`", TypicalPolicy),
    ],
)
def test_the_options_of_a_strategy_have_the_defaults_of_the_code(row, factory):
    (cell,) = re.findall(rf"^\| {re.escape(row)} \| (.+) \|$", section("python.md", "Choices"), flags=re.MULTILINE)
    _, options = parse_spec(f"any:{','.join(CODE.findall(cell))}")
    assert options == {name: p.default for name, p in inspect.signature(factory).parameters.items()}


def test_the_options_of_the_drafter_model_are_listed_with_the_defaults_that_they_have():
    (cell,) = re.findall(r"^\| drafter `model` \| (.+) \|$", section("python.md", "Choices"), flags=re.MULTILINE)
    options = inspect.signature(ModelDrafter).parameters
    listed = [code for code in CODE.findall(cell) if code != "k"]
    assert [code.partition("=")[0] for code in listed] == list(options)
    _, defaults = parse_spec(f"any:{','.join(code for code in listed if '=' in code)}")
    assert defaults == {name: p.default for name, p in options.items() if p.default not in (None, p.empty)}


def test_every_policy_has_a_row_with_what_it_declares():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|", section("guarantees.md", "The policies"), flags=re.MULTILINE)
    names = [entry.name for entry in registry.Registry(plugins.load_plugins()).entries("policy")]
    assert sorted(name for name, _, _ in rows) == names
    for name, greedy, sampled in rows:
        policy = registry.default_registry().build("policy", name)
        assert greedy == ("the same tokens" if policy.lossless else "nothing"), name
        invariant = "refused" if name == "greedy" else "the same tokens"
        lossless = invariant if policy.drafter_invariant else "the same distribution"
        assert sampled == (lossless if policy.lossless else "nothing"), name


def test_the_calls_of_a_pipeline_have_headings_with_their_signatures():
    expected = {f"Pipeline{signature(Pipeline.__init__, bound=False)}"}
    for name, member in inspect.getmembers(Pipeline, callable):
        if not name.startswith("_"):
            expected.add(f"Pipeline.{name}{signature(member, bound=inspect.ismethod(member))}")
    assert set(headings("python.md")) == expected


def test_a_guarantee_starts_as_the_page_says():
    starts = first_column("guarantees.md", "Reading the guarantee")
    verifier = type("Target", (), {"invariance": "argmax", "approximations": ()})()
    policies = [GreedyPolicy(), CoupledPolicy(), RejectionPolicy(), MarginPolicy()]
    for exact_to, policy, temperature in itertools.product(("quantized", "full", "target"), policies, (0.0, 0.5)):
        start = f"{exact_to}: " if policy.lossless else "none: "
        assert start in starts
        claim = guarantee_of(verifier, policy, exact_to, "the target", Sampling(temperature=temperature))
        assert claim.startswith(start)
        assert guarantee_of_reference(verifier, exact_to, "the target").startswith(f"{exact_to}: ")
    assert first_column("guarantees.md", "What is declared")[1:] == ['"bitwise"', '"argmax"', '"none"']


LINK = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/\w+\.py)\)")


@pytest.mark.parametrize("page", PAGES)
def test_a_link_to_a_test_leads_to_one_that_exists(page):
    for name, file in LINK.findall(text_of(page)):
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE), name


def test_each_sentence_of_what_is_proven_links_to_its_test():
    """Every row of such a table; a measurement may name a script instead."""
    tables = re.findall(
        r"^\| sentence \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", text_of("guarantees.md"), flags=re.MULTILINE
    )
    rows = [row for table in tables for row in table.splitlines()]
    assert len(tables) == 4
    assert len(rows) > 25
    for row in rows:
        assert LINK.search(row) or "`benchmarks/" in row, row


def test_the_planted_bugs_are_those_of_the_tests():
    checks = {"check_drafter": DRAFTERS, "check_verifier": VERIFIERS}
    checks |= {"check_policy": POLICIES, "check_quantizer": QUANTIZERS}
    rows = re.findall(r"^\| (.+) \| `(check_\w+)` \|$", section("testing.md", "Planted bugs"), flags=re.MULTILINE)
    assert rows == [(bug, check) for check, bugs in checks.items() for bug in bugs]
    assert len(rows) >= 12


def test_the_checks_have_headings_with_their_signatures():
    checks = (check_drafter, check_verifier, check_quantizer, check_policy)
    assert headings("testing.md") == [f"{check.__name__}{signature(check)}" for check in checks]
