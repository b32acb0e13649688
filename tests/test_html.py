"""The page of ``quasar parity --html``: whole, self-contained, escaped, equal to the report, and refused early."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from html.parser import HTMLParser

import attrs
import pytest

from quasar.commands import parity_model, plots
from quasar.commands.parity import AgreementReport, as_json
from quasar.errors import InvalidRequestError
from quasar.testing.models import tiny
from quasar.verifiers.invariance import Fork, InvarianceReport, WidthReport, measure_invariance
from test_parity import WidthDependent
from toys import word_tokenizer

VOID = {"meta", "link", "br", "hr", "img", "input"}
CONFIG = {"model": "a/model", "quantizer": "w8a8", "strict": False, "dtype": None, "threads": 1}
REPORT = InvarianceReport(
    "argmax",
    "none",
    {1: WidthReport(0.0, 0), 2: WidthReport(1.25e-6, 1), 3: WidthReport(0.5, 2)},
    [Fork(2, 17, 2e-5), Fork(3, 17, 2e-5), Fork(3, 21, 0.25)],
)
AGREEMENT = AgreementReport(0.9375, 0.0123, 64, [20, 3, 37])


class Page(HTMLParser):
    """Checks that tags balance while it reads; keeps elements, texts and the cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        assert len(dict(attributes)) == len(attributes), f"<{tag}> has an attribute twice"
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)
        if self._open and self._open[-1] in ("th", "td"):
            self.rows[-1][-1] += data


@pytest.fixture
def parity_html():
    """The function, where its extra is installed."""
    pytest.importorskip("matplotlib")
    from quasar.commands.parity_html import parity_html

    return parity_html


@pytest.mark.parametrize("empty", [False, True])
def test_the_page_is_well_formed_and_needs_nothing_beside_it(parity_html, empty):
    """Balanced tags, unique ids that every reference finds, no script, and no address but the names of SVG."""
    invariance, agreement = REPORT, AGREEMENT
    if empty:
        invariance = InvarianceReport("bitwise", "bitwise", {1: WidthReport(0.0, 0)}, [])
        agreement = AgreementReport(0.0, 1.0, 64, [])
    text = parity_html(invariance, agreement, CONFIG)
    page = Page(text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {tag for tag, _ in page.elements} & {"script", "link", "img", "image", "iframe", "object", "base"} == set()
    for tag, attributes in page.elements:
        assert not attributes.keys() & {"src", "srcset", "data", "action", "poster"}
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#")[0] == "#"
            assert attributes.get(name, "#")[1:] in ("", *ids), f"<{tag}> refers to nothing"
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert set(re.findall(r"url\(#(.*?)\)", text)) <= set(ids)
    assert "@import" not in text
    without_names = re.sub(r'xmlns(:xlink)?="http://www\.w3\.org/\S+"', "", text)
    assert not re.search(r"https?:|//", without_names)
    assert [tag for tag, _ in page.elements].count("svg") == 3


def test_the_values_are_those_of_the_report(parity_html):
    """The tables by width, of forks and of agreement; and all of it, unrounded, as JSON."""
    page = Page(parity_html(REPORT, AGREEMENT, CONFIG))
    for row in (
        ["model", "a/model"],
        ["strict", "no"],
        ["dtype", "default"],
        ["threads", "1"],
        ["1", "0, bitwise", "0"],
        ["2", "1.25e-06", "1"],
        ["3", "0.5", "2"],
        ["positions with the same argmax (top-1)", "0.9375"],
        ["mean KL(full ‖ target), in nats", "0.0123"],
        ["tokens compared", "64"],
        ["runs of agreeing tokens", "3"],
        ["longest run", "37"],
    ):
        assert row in page.rows
    head = page.rows.index(["position", "gap", "widths"])
    assert page.rows[head + 1 : head + 3] == [["21", "0.25", "3"], ["17", "2e-05 (near tie)", "2, 3"]]
    assert "Declared argmax, measured none: the declaration does not hold." in page.texts["strong"]
    expected = {"config": CONFIG, **as_json(REPORT, AGREEMENT)}
    assert json.loads("".join(page.texts["pre"])) == json.loads(json.dumps(expected))


def test_the_same_report_gives_the_same_page(parity_html, monkeypatch):
    """Whatever settings of matplotlib the program around has; they are as before afterwards. pyplot is not used."""
    import matplotlib

    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    first = parity_html(REPORT, AGREEMENT, CONFIG)
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 31, "svg.fonttype": "path"}):
        before = matplotlib.rcParams.copy()
        assert parity_html(REPORT, AGREEMENT, CONFIG) == first
        assert matplotlib.rcParams.copy() == before


def test_names_from_outside_are_escaped(parity_html):
    """A model's name, a quantizer's spec, a version: none of them can become an element or an attribute."""
    hostile = '"><script>alert(1)</script><img src=x onerror=alert(1)>&amp;'
    page = Page(parity_html(REPORT, AGREEMENT, {"model": hostile, "quantizer": hostile, hostile: hostile}))
    assert {tag for tag, _ in page.elements} & {"script", "img"} == set()
    assert [hostile, hostile] in page.rows
    assert hostile in "".join(page.texts["h1"])
    assert json.loads("".join(page.texts["pre"]))["config"]["model"] == hostile


@pytest.mark.parametrize(("size", "declared", "holds"), [(1e-7, "bitwise", False), (1e-7, "argmax", True)])
def test_the_page_says_whether_the_declaration_holds(parity_html, size, declared, holds):
    """A verifier whose logits depend on the width is found out, and an honest one is not accused."""
    verifier = WidthDependent(40, seed=3, size=size)
    verifier.invariance = declared
    report = measure_invariance(verifier, [1, 2, *WidthDependent(40, seed=3, size=0.0).greedy((1, 2), 40)], begin=2)
    page = Page(parity_html(report, AGREEMENT, CONFIG))
    verdict = f"Declared {declared}, measured argmax: the declaration {'holds' if holds else 'does not hold'}."
    assert page.texts["strong"] == [verdict]
    assert [row[0] for row in page.rows if len(row) == 3 and row[0].isdigit()][:16] == [str(n) for n in range(1, 17)]


def test_only_the_clearest_of_many_forks_are_listed(parity_html):
    """And it is said that there are more."""
    many = attrs.evolve(REPORT, forks=[Fork(2, position, position / 7) for position in range(1000)])
    page = Page(parity_html(many, AGREEMENT, CONFIG))
    head = page.rows.index(["position", "gap", "widths"])
    assert [row[0] for row in page.rows[head + 1 : head + 101]] == [str(position) for position in range(999, 899, -1)]
    assert page.rows[head + 101][0].startswith("positions with")
    assert "At 1000 position(s)" in "".join(page.texts["p"])
    assert "The 100 with the widest gaps are shown." in "".join(page.texts["p"])


@pytest.mark.parametrize("values", [{}, {1: 0.0}, {1: 0.0, 2: math.nan, 3: math.inf}, {1: 5e-324, 2: 1e300}])
def test_a_plot_of_odd_values_is_drawn_all_the_same(values):
    """Nothing, only zero, no numbers, the ends of the range."""
    pytest.importorskip("matplotlib")
    Page(plots.differences(values))


def labels(svg: str) -> list[str]:
    return [text for text in Page(svg).texts["text"] if text.strip()]


def test_a_plot_shows_zero_as_bitwise_and_counts_in_whole_numbers():
    """The foot of the logarithmic axis is not a number; bars of counts have no half steps; many lengths share bars."""
    pytest.importorskip("matplotlib")
    assert {"0, bitwise", "1e-7", "1e-6", "16"} <= set(labels(plots.differences({1: 0.0, 16: 2e-7})))
    shown = labels(plots.counts({1: 0, 2: 1}))
    assert shown == ["1", "2", "width", "0", "1", "argmax mismatches"]
    assert "none" not in shown
    assert "none" in labels(plots.counts({1: 0, 2: 0}))
    assert labels(plots.counts(dict.fromkeys(range(1, 33), 1)))[:17] == [*map(str, range(1, 33, 2)), "width"]
    assert plots.lengths(range(1, 1001)).count("<clipPath") <= 1
    assert plots.lengths(range(1, 1001)).count('id="lengths-patch_') < 45


# The command


ARGUMENTS = ["parity", "--quantizer", "none", "--tokens", "20"]


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model fails the test."""
    monkeypatch.setattr("quasar.checkpoints.models.load_model", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """A folder with a tiny model and its tokenizer."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    tiny("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def test_the_command_writes_the_page_beside_what_it_prints(parity_html, quasar_command, saved, tmp_path):
    """With the table and with JSON: the same output as without, and the page has the same figures."""
    page, arguments = tmp_path / "a page.html", [*ARGUMENTS, "--model", saved]
    page.write_text("an old one")
    table = quasar_command(*arguments)
    assert table[0] == 0
    assert quasar_command(*arguments, "--html", str(page)) == table
    assert saved in page.read_text(encoding="utf-8")
    status, out, err = quasar_command(*arguments, "--json", "--html", str(page))
    assert (status, err) == (0, "")
    found = json.loads("".join(Page(page.read_text(encoding="utf-8")).texts["pre"]))
    config = found.pop("config")
    assert found == json.loads(out)
    assert config.items() >= {"model": saved, "quantizer": "none", "strict": False, "tokens": 20, "threads": 1}.items()
    assert config.keys() >= {"quasar", "torch", "transformers", "python", "dtype", "device", "date"}


def test_a_declaration_that_does_not_hold_is_written_and_status_1(parity_html, quasar_command, monkeypatch, tmp_path):
    """The page is wanted most then."""
    monkeypatch.setattr(parity_model, "measure_model", lambda *_, **__: (REPORT, AGREEMENT))
    status, out, _ = quasar_command(*ARGUMENTS, "--html", str(tmp_path / "page.html"))
    assert status == 1
    assert "declared argmax, measured none" in out
    assert "does not hold" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("place", ["", "nowhere/page.html"])
def test_a_path_that_cannot_be_written_is_refused_before_the_measurement(
    parity_html, quasar_command, no_model, tmp_path, place
):
    """A folder, and a file in a folder that is not there: one line."""
    path = tmp_path / place
    status, out, err = quasar_command(*ARGUMENTS, "--html", str(path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"quasar: --html: {path} cannot be written: ")


def test_a_measurement_that_fails_leaves_no_page_and_keeps_an_old_one(parity_html, quasar_command, tmp_path):
    """The check of the path changes nothing; a link to nowhere stays too."""
    old, new, link = tmp_path / "old.html", tmp_path / "new.html", tmp_path / "link.html"
    old.write_text("an old one")
    link.symlink_to(tmp_path / "target.html")
    for path in (old, new, link):
        assert quasar_command(*ARGUMENTS, "--model", "./nowhere", "--html", str(path))[0] == 2
    assert old.read_text() == "an old one"
    assert not new.exists()
    assert os.path.islink(link)


def test_a_missing_matplotlib_is_refused_before_the_measurement(quasar_command, no_model, monkeypatch, tmp_path):
    """By name of the extra; and nothing is refused without ``--html``."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = quasar_command(*ARGUMENTS, "--html", str(tmp_path / "page.html"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("quasar: plots need the extra html")
    assert "pip install 'quasar-decode[html]'" in err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidRequestError, match="the extra html"):
        plots.require_matplotlib()
    monkeypatch.setattr(
        parity_model, "measure_model", lambda *_, **__: (attrs.evolve(REPORT, declared="none"), AGREEMENT)
    )
    assert quasar_command(*ARGUMENTS)[0] == 0
