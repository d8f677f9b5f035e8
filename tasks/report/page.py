"""The HTML of a report. Whatever comes from a run is escaped here or reaches the page as text by its script.

A content security policy lets only the page's own two scripts run, by their digest, and forbids every connection.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files
from typing import Any

from rl_core.metrics import METRICS, glossary_entry
from tasks.report.charts import SMALL_MULTIPLES
from tasks.report.data import RunData
from tasks.report.head import facts, health, verdict
from tasks.report.tables import changes, config_table, iterations, lineage, metrics

_TITLES = {
    "policy/entropy": "Entropy",
    "policy/approx_kl": "KL to the old policy",
    "policy/kl": "KL to the reference",
    "learner/grad_norm": "Gradient norm",
    "mismatch/k3": "Sampler-learner mismatch",
    "groups/kept_frac": "Groups with signal",
    "completion/truncated_frac": "Truncated completions",
    "completion/tokens_mean": "Tokens per completion",
    "learner/lr": "Learning rate",
}
_VEGA_LICENCE = """<!-- The first script is Vega, Vega-Lite and Vega-Embed, Copyright 2015-2023 University of
Washington Interactive Data Lab, BSD-3-Clause; with d3, ISC licence, Copyright Mike Bostock.
Redistribution and use in source and binary forms, with or without modification, are permitted
provided that the following conditions are met: redistributions of source code must retain the above
copyright notice, this list of conditions and the following disclaimer; redistributions in binary
form must reproduce them in the documentation and/or other materials; neither the name of the
copyright holder nor the names of its contributors may be used to endorse or promote products
derived from this software without specific prior written permission. THIS SOFTWARE IS PROVIDED BY
THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES ARE DISCLAIMED.
IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT,
INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES HOWEVER CAUSED, EVEN IF ADVISED OF THE
POSSIBILITY OF IT. -->"""


def page(run: RunData, data: dict[str, Any], block: str, library: str, generated: int) -> str:
    """The page.

    Args:
        run: the run.
        data: what is drawn.
        block: the same as JSON fit for a script block.
        library: the script that defines `window.vegaEmbed`.
        generated: iterations that have completions, whether the page holds them or not.
    """
    sections = _sections(run, data, generated)
    notes = "".join(f'<li class="warning">{escape(note)}</li>' for note in dict.fromkeys(run.notes))
    links = "".join(f'<li><a href="#{_id(title)}">{title}</a></li>' for title in sections)
    bodies = "\n".join(
        f'<section aria-labelledby="{_id(title)}"><h2 id="{_id(title)}">{title}</h2>{body}</section>'
        for title, body in sections.items()
    )
    script = files("tasks.report").joinpath("assets/report.js").read_text("utf-8")
    style = files("tasks.report").joinpath("assets/report.css").read_text("utf-8")
    name = escape(run.store.name)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(library, script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: report</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#{_id(next(iter(sections)))}">Skip to the content</a>
<header class="top"><h1>{name}</h1>{verdict(run)}{facts(run)}{f"<ul>{notes}</ul>" if notes else ""}
<nav aria-label="Sections"><ul>{links}</ul></nav></header>
<main>
<noscript><p class="warning">Charts and samples need JavaScript; the tables do not.</p></noscript>
{bodies}
</main>
<footer class="top">Written by rlstages from {escape(_origin(run))}</footer>
<div id="tip" role="tooltip" hidden></div>
{_VEGA_LICENCE}
<script>{library}</script>
<script type="application/json" id="data">{block}</script>
<script>{script}</script>
</body>
</html>
"""


def _sections(run: RunData, data: dict[str, Any], generated: int) -> dict[str, str]:
    """Title and content of every section that has one."""
    sections = {
        "Health": health(run),
        "Learning": _learning(data),
        "Policy and data": _multiples(data),
        "Time": _time(data),
        "Rewards and lengths": _rewards(data),
        "Samples": _samples(data, generated),
        "Iterations": iterations(run),
        "Metrics": metrics(run, data["tables"]),
        "Config and changes": changes(run) + config_table(run),
        "Lineage": lineage(run),
    }
    return {title: body for title, body in sections.items() if body}


def _policy(*scripts: str) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"


def _origin(run: RunData) -> str:
    last = [m.measured.get("finished_at") for made in run.iterations for m in made.manifests.values() if m]
    stamp = max((str(value) for value in last if value), default="")
    return f"{run.record.get('code_version', 'an unknown version')}" + (f"; last output {stamp}" if stamp else "")


def _id(title: str) -> str:
    return title.lower().replace(" ", "-")


def _figure(data: dict[str, Any], chart: str, title: str, about: str, tip: str = "") -> str:
    """A chart with its caption; nothing where the run has no data for it."""
    if chart not in data["charts"]:
        return ""
    shown = f'<span class="term" tabindex="0" data-tip="{escape(tip)}">{escape(title)}</span>' if tip else escape(title)
    return (
        f"<figure><figcaption>{shown}<small>{escape(about)}</small></figcaption>"
        f'<div class="chart" data-chart="{escape(chart)}" data-label="{escape(f"{title}: {about}")}"></div></figure>'
    )


def _grid(*figures: str, size: str = "") -> str:
    found = "".join(figures)
    return f'<div class="grid {size}">{found}</div>' if found else ""


def _learning(data: dict[str, Any]) -> str:
    return _grid(
        _figure(data, "reward", "Training reward", "mean over completions, band: 95% bootstrap interval over groups"),
        _figure(
            data,
            "heldout",
            "Held-out accuracy",
            "after each iteration; bars and bands: 95% intervals; start: before training",
        ),
    )


def _multiples(data: dict[str, Any]) -> str:
    found = []
    for name in SMALL_MULTIPLES:
        about = METRICS[glossary_entry(name) or name]
        found.append(_figure(data, name, _TITLES[name], name, f"{name} ({about.unit}): {about.about}"))
    return _grid(*found, size="small")


def _time(data: dict[str, Any]) -> str:
    about = "wall time as each output's manifest has it; a reused output shows the time it took when it was made"
    return _figure(data, "seconds", "Seconds per stage", about)


def _rewards(data: dict[str, Any]) -> str:
    lengths = sorted(set(data["tables"]["lengths"]["iteration"]))
    figures = [
        _figure(data, f"lengths/{number}", f"Completion lengths, iteration {number}", "tokens of the policy")
        for number in lengths
    ]
    about = "mean per component, unweighted, before shaping"
    return _grid(_figure(data, "components", "Reward components", about), *figures, size="medium")


def _samples(data: dict[str, Any], generated: int) -> str:
    if not data["samples"]:
        return ""
    held = len(data["samples"])
    left = f'<p class="note">This page holds the completions of {held} of {generated} iterations.</p>'
    return f"""{left if held < generated else ""}
<div class="controls">
<label>iteration <select id="iteration"></select></label>
<label>groups <select id="which"><option value="signal">with signal</option><option value="ends">best and worst</option>
<option value="all">all</option></select></label>
<label>colour <select id="colour"><option value="advantage">advantage</option>
<option value="logprob">sampler log-prob</option></select></label>
<label>text in prompt or completion <input id="words" type="search"></label>
</div>
<p class="key" id="key-advantage"><span><i class="plus"></i>advantage above 0: made more likely</span>
<span><i class="minus"></i>below 0: made less likely</span><span id="scale"></span></p>
<p class="key" id="key-logprob"><span><i class="minus"></i>unlikely token: full colour from -6 nats on</span></p>
<p class="note" id="count" aria-live="polite"></p>
<div id="groups"></div>"""
