"""What ``quasar parity`` measured, as one HTML page that needs nothing beside it: no network, no script."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from html import escape
from typing import Any

import torch
import transformers

from quasar import __version__
from quasar.commands import plots
from quasar.commands.parity import AgreementReport, as_json
from quasar.verifiers.invariance import NEAR_TIE, InvarianceReport

_MOST_FORKS = 100
_MEANINGS = {
    "bitwise": "every row of logits has the same bits at every width",
    "argmax": f"logits differ, and another token is chosen only where the two best are within {NEAR_TIE:g}",
    "none": "logits differ, and so may the choice of a token",
}
_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --accent: #0b62b8; --rule: #d5d9de;
  --good: #1a6b35; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16191d; --ink: #dfe3e8; --accent: #6cb2f7; --rule: #3a4048; --good: #6fce8b; --bad: #ff8a80; } }
body { margin: 2rem auto; padding: 0 1rem; max-width: 46rem; font: 1rem/1.5 system-ui, sans-serif;
  background: var(--paper); color: var(--ink); }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--rule); }
.verdict { padding-left: .8rem; border-left: .3rem solid var(--good); }
.fails { border-color: var(--bad); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem 1.2rem .15rem 0; border-bottom: 1px solid var(--rule); text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
thead th { white-space: nowrap; }
figure { margin: 1rem 0; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: .9rem; }
pre { overflow-x: auto; font-size: .8rem; border: 1px solid var(--rule); padding: .6rem; }
"""


def conditions(choices: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, and everything else on which the figures depend: versions, threads, processor, date."""
    device = choices.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    return {
        **choices,
        "dtype": choices.get("dtype") or ("float32" if device == "cpu" else "the checkpoint's own"),
        "device": device,
        "quasar": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "system": platform.system(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def parity_html(invariance: InvarianceReport, agreement: AgreementReport, config: Mapping[str, Any]) -> str:
    """The page. The same arguments give the same page.

    Args:
        invariance: What :func:`quasar.verifiers.invariance.measure_invariance` found.
        agreement: What :func:`quasar.commands.parity.measure_agreement` found.
        config: What was measured, by name, as :func:`conditions` collects it; ``model`` and ``quantizer`` make the
            title. Values are shown as text.

    Raises:
        InvalidRequestError: The extra ``html`` is not installed.
    """
    plots.require_matplotlib()
    title = f"Parity of {config.get('model', 'a model')}, quantizer {config.get('quantizer', 'unknown')}"
    report = json.dumps({"config": config, **as_json(invariance, agreement)}, indent=1, default=str)
    body = [
        _element("h1", title),
        _verdict(invariance),
        _element("h2", "What was measured"),
        _table(None, config.items()),
        *_by_width(invariance),
        *_forks(invariance),
        *_agreement(agreement),
        _element("h2", "The report as JSON"),
        f"<details><summary>All figures, unrounded</summary><pre>{escape(report)}</pre></details>",
    ]
    head = (
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{_element('title', title)}\n<style>{_STYLE}</style>"
    )
    return '<!DOCTYPE html>\n<html lang="en">\n<head>\n{}\n</head>\n<body>\n{}\n</body>\n</html>\n'.format(
        head, "\n".join(body)
    )


def _verdict(invariance: InvarianceReport) -> str:
    declared, measured = invariance.declared, invariance.measured
    text = (
        f"Declared {declared}, measured {measured}: the declaration {'holds' if invariance.holds else 'does not hold'}."
    )
    kind = "verdict" if invariance.holds else "verdict fails"
    return f'<p class="{kind}"><strong>{escape(text)}</strong><br>{escape(f"{measured}: {_MEANINGS[measured]}.")}</p>'


def _by_width(invariance: InvarianceReport) -> Iterable[str]:
    widths = invariance.widths
    yield _element("h2", "Logits by width")
    yield _element("p", "The width is how many positions one forward computes. Each row is compared with width 1.")
    sizes = plots.differences({width: report.max_abs_diff for width, report in widths.items()})
    yield _figure(sizes, "Largest difference of any logit from its value at width 1. Hollow: bit-identical.")
    mismatches = plots.counts({width: report.argmax_mismatches for width, report in widths.items()})
    yield _figure(mismatches, "Positions at which another token than at width 1 has the largest logit.")
    rows = ((width, _difference(report.max_abs_diff), report.argmax_mismatches) for width, report in widths.items())
    yield _table(("width", "largest |Δlogit|", "argmax mismatches"), rows)


def _forks(invariance: InvarianceReport) -> Iterable[str]:
    """One row a position, the clearest choices first: those say most against the verifier."""
    yield _element("h2", "Forks")
    positions: dict[int, tuple[float, list[int]]] = {}
    for fork in invariance.forks:
        positions.setdefault(fork.position, (fork.gap, []))[1].append(fork.width)
    if not positions:
        yield _element("p", "No width chooses another token at any position.")
        return
    text = (
        f"At {len(positions)} position(s) some width chooses another token than width 1. Positions count from the "
        f"start of the prompt; the gap is between the two best logits at width 1; up to {NEAR_TIE:g} it is a near tie."
    )
    if len(positions) > _MOST_FORKS:
        text += f" The {_MOST_FORKS} with the widest gaps are shown."
    yield _element("p", text)
    ordered = sorted(positions.items(), key=lambda item: (-item[1][0], item[0]))[:_MOST_FORKS]
    rows = (
        (position, f"{gap:.3g}{' (near tie)' if gap <= NEAR_TIE else ''}", ", ".join(map(str, widths)))
        for position, (gap, widths) in ordered
    )
    yield _table(("position", "gap", "widths"), rows)


def _agreement(agreement: AgreementReport) -> Iterable[str]:
    yield _element("h2", "Agreement with the full model")
    yield _element("p", "The target against the full model, on the full model's own greedy text.")
    rows = (
        ("positions with the same argmax (top-1)", f"{agreement.top1:.4f}"),
        ("mean KL(full ‖ target), in nats", f"{agreement.kl:.4g}"),
        ("tokens compared", agreement.tokens),
        ("runs of agreeing tokens", len(agreement.runs)),
        ("longest run", max(agreement.runs, default=0)),
    )
    yield _table(None, rows)
    caption = "Lengths of the runs of agreeing positions. A run ends at a disagreement or at the end of a text."
    yield _figure(plots.lengths(agreement.runs), caption)


def _difference(value: float) -> str:
    return "0, bitwise" if value == 0 else f"{value:.3g}"


def _shown(value: object) -> str:
    """A value for a reader; what was left open is the program's default."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "default" if value is None else str(value)


def _element(name: str, text: str) -> str:
    return f"<{name}>{escape(text)}</{name}>"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>\n{svg.strip()}\n{_element('figcaption', caption)}\n</figure>"


def _table(head: Iterable[str] | None, rows: Iterable[Iterable[object]]) -> str:
    """A table whose first cells name their rows."""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head or ())
    lines = [f"<thead><tr>{names}</tr></thead>"] if names else []
    for first, *others in rows:
        cells = "".join(_element("td", _shown(cell)) for cell in others)
        lines.append(f'<tr><th scope="row">{escape(_shown(first))}</th>{cells}</tr>')
    return "<table>\n{}\n</table>".format("\n".join(lines))
