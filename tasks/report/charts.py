"""The charts of a report as Altair specifications, and the JavaScript that draws them.

Charts name their table and hold no numbers: the page draws all of them from its one block of data, with one copy of
the library. Colours are CSS variables of the page, so that light, dark and printed pages need no second drawing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import altair as alt
import vl_convert

from rl_core.metrics import METRICS, glossary_entry
from rl_core.stages import STAGES
from tasks.report.data import START, Table

Chart = alt.Chart | alt.LayerChart | alt.FacetChart

STAGE_COLOURS = {stage: f"var(--s{i})" for i, stage in enumerate(STAGES, 1)}
SMALL_MULTIPLES = (
    "policy/entropy",
    "policy/approx_kl",
    "policy/kl",
    "learner/grad_norm",
    "mismatch/k3",
    "groups/kept_frac",
    "completion/truncated_frac",
    "completion/tokens_mean",
    "learner/lr",
)
_INK = alt.value("var(--series)")
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "gridColor": "var(--grid)",
    },
    "legend": {
        "labelColor": "var(--ink)",
        "labelFontSize": 12,
        "title": None,
        "orient": "top",
        "symbolType": "square",
    },
}


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed, 0.9 MB, as one script that defines `window.vegaEmbed`."""
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return script


def charts(tables: dict[str, Table]) -> dict[str, dict[str, Any]]:
    """Vega-Lite specification by chart name. A chart that would have nothing to show is left out."""
    made: dict[str, Chart] = {}
    metrics = tables["metrics"]
    count = len(metrics["iteration"])
    if _has(metrics.get("reward/mean")):
        made["reward"] = _reward(count)
    if _has(tables["heldout"]["accuracy"]):
        made["heldout"] = _heldout(tables["heldout"])
    for name in SMALL_MULTIPLES:
        if _has(metrics.get(name)):
            made[name] = _metric(name, count)
    if tables["seconds"]["seconds"]:
        made["seconds"] = _seconds(tables["seconds"])
    if _has(tables["components"]["mean"]):
        made["components"] = _components(tables["components"])
    for number in sorted(set(tables["lengths"]["iteration"])):
        made[f"lengths/{number}"] = _lengths(tables["lengths"], number)
    return {name: chart.to_dict() for name, chart in made.items()}


def _has(values: list[Any] | None) -> bool:
    return any(value is not None for value in values or ())


def _chart(table: str, height: int) -> alt.Chart:
    return alt.Chart(alt.NamedData(table), width="container", height=height)


def _iteration() -> alt.X:
    """Iterations on a linear axis of whole numbers; the starting model is not a number."""
    label = f"datum.value == {START} ? 'start' : datum.value < 0 ? '' : format(datum.value, 'd')"
    scale = alt.Scale(nice=False, padding=8)
    axis = alt.Axis(tickMinStep=1, labelExpr=label, grid=False, tickCount=8, labelOverlap=True, labelSeparation=6)
    return alt.X(field="iteration", type="quantitative", title="iteration", axis=axis, scale=scale)


def _y(field: str, title: str, form: str = "~g", zero: bool = False, domain: list[float] | None = None) -> alt.Y:
    scale = alt.Scale(domain=domain) if domain else alt.Scale(zero=zero)
    axis = alt.Axis(format=form, tickCount=4)
    return alt.Y(field=field, type="quantitative", title=title, axis=axis, scale=scale)


def _tip(*fields: tuple[str, str, str]) -> list[alt.Tooltip]:
    """Tooltips by (column, title, number format)."""
    found = []
    for name, title, form in fields:
        tip = alt.Tooltip(field=name, title=title)
        found.append(tip.type("quantitative").format(form) if form else tip)
    return found


def _line(base: alt.Chart, count: int) -> alt.Chart:
    """A line with a point at every value, so that a single one between nulls is seen too; small ones where many are."""
    size = 30 if count <= 50 else 4
    line: alt.Chart = base.mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=size, filled=True))
    return line


def _reward(count: int) -> Chart:
    base = _chart("metrics", 220).encode(x=_iteration(), color=_INK)
    band = base.mark_area(opacity=0.22).encode(
        y=_y("band/reward_low", "mean reward"), y2=alt.Y2(field="band/reward_high")
    )
    tip = _tip(
        ("iteration", "iteration", "d"),
        ("reward/mean", "mean reward", ".4f"),
        ("band/reward_low", "95% from", ".4f"),
        ("band/reward_high", "to", ".4f"),
    )
    line = _line(base, count)
    return alt.layer(band, line.encode(y=_y("reward/mean", "mean reward"), tooltip=tip))


def _heldout(table: Table) -> Chart:
    answers = list(dict.fromkeys(table["answers"]))
    legend = alt.Legend() if len(answers) > 1 else None
    colour = alt.Color(
        field="answers",
        type="nominal",
        scale=alt.Scale(domain=answers, range=[f"var(--c{i % 6 + 1})" for i in range(len(answers))]),
        legend=legend,
    )
    base = _chart("heldout", 220).encode(x=_iteration(), color=colour)
    ends = {"y": _y("low", "accuracy", ".0%", domain=[0, 1]), "y2": alt.Y2(field="high")}
    greedy = alt.datum.answers == "greedy"
    bars = base.transform_filter(greedy).mark_rule(strokeWidth=1.5, opacity=0.55).encode(**ends)
    layers = [bars]
    if set(answers) != {"greedy"}:
        layers.insert(0, base.transform_filter(~greedy).mark_area(opacity=0.2).encode(**ends))
    tip = _tip(
        ("iteration", "iteration", "d"),
        ("answers", "answers", ""),
        ("accuracy", "accuracy", ".1%"),
        ("low", "95% from", ".1%"),
        ("high", "to", ".1%"),
    )
    line = _line(base, len(set(table["iteration"])))
    return alt.layer(*layers, line.encode(y=_y("accuracy", "accuracy", ".0%", domain=[0, 1]), tooltip=tip))


def _metric(name: str, count: int) -> alt.Chart:
    unit = METRICS[glossary_entry(name) or name].unit
    share = unit == "share"
    line = _line(_chart("metrics", 110), count)
    form = "~e" if name == "learner/lr" else ".5~g"
    y = _y(name, unit, ".0%", domain=[0, 1]) if share else _y(name, "" if unit == "1" else unit, form)
    tip = _tip(("iteration", "iteration", "d"), (name, name, ".1%" if share else ".4~g"))
    chart: alt.Chart = line.encode(x=_iteration(), y=y, color=_INK, tooltip=tip)
    return chart


def _seconds(table: Table) -> alt.Chart:
    present = [stage for stage in STAGES if stage in set(table["stage"])]
    colour = alt.Color(
        field="stage",
        type="nominal",
        scale=alt.Scale(domain=present, range=[STAGE_COLOURS[stage] for stage in present]),
        legend=alt.Legend(columns=3),
    )
    axis = alt.Axis(labelOverlap="parity", labelSeparation=10, labelAngle=0, grid=False, ticks=False)
    chart: alt.Chart = (
        _chart("seconds", 220)
        .mark_bar()
        .encode(
            x=alt.X(field="iteration", type="ordinal", title="iteration", axis=axis),
            y=alt.Y(field="seconds", type="quantitative", title="seconds", axis=alt.Axis(format="~g", tickCount=5)),
            color=colour,
            order=alt.Order(field="order", type="quantitative"),
            tooltip=_tip(("iteration", "iteration", "d"), ("stage", "stage", ""), ("seconds", "seconds", ".2f")),
        )
    )
    return chart


def _components(table: Table) -> alt.Chart:
    names = sorted(set(table["component"]))
    colour = alt.Color(
        field="component",
        type="nominal",
        scale=alt.Scale(domain=names, range=[f"var(--c{i % 6 + 1})" for i in range(len(names))]),
        legend=alt.Legend(columns=2, labelLimit=220),
    )
    tip = _tip(("iteration", "iteration", "d"), ("component", "component", ""), ("mean", "mean", ".4f"))
    y = _y("mean", "mean, unweighted", zero=True)
    line = _line(_chart("components", 170), len(set(table["iteration"])))
    chart: alt.Chart = line.encode(x=_iteration(), y=y, color=colour, tooltip=tip)
    return chart


def _lengths(table: Table, number: int) -> alt.Chart:
    """The charts of both iterations have the same axes, so that they can be compared by eye."""
    top: dict[tuple[int, int], int] = {}
    for iteration, low, count in zip(table["iteration"], table["from_tokens"], table["completions"], strict=True):
        top[iteration, low] = top.get((iteration, low), 0) + count
    axis = alt.Axis(format="d", grid=False, tickMinStep=1, tickCount=8)
    x = alt.X(
        field="from_tokens",
        type="quantitative",
        title="tokens",
        axis=axis,
        bin="binned",
        scale=alt.Scale(domain=[0, max(table["to_tokens"])], nice=False),
    )
    colour = alt.Color(
        field="end",
        type="nominal",
        scale=alt.Scale(domain=["ended", "truncated"], range=["var(--c1)", "var(--c2)"]),
        legend=alt.Legend(),
    )
    y = alt.Y(
        field="completions",
        type="quantitative",
        title="completions",
        axis=alt.Axis(format="d", tickMinStep=1, tickCount=4),
        scale=alt.Scale(domain=[0, max(top.values())]),
    )
    tip = _tip(
        ("from_tokens", "from tokens", "d"), ("to_tokens", "below", "d"), ("end", "end", ""), ("completions", "n", "d")
    )
    chart: alt.Chart = (
        _chart("lengths", 170)
        .transform_filter(alt.datum.iteration == number)
        .mark_bar(binSpacing=1)
        .encode(x=x, x2=alt.X2(field="to_tokens"), y=y, color=colour, tooltip=tip)
    )
    return chart
