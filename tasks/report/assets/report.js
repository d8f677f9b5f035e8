"use strict";
// Everything that comes from a model or a user reaches the page as text (textContent), never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// -- one tooltip for terms, charts and tokens ------------------------------------------------------------------------
const tip = byId("tip");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const below = y + 18 + box.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(x + 8, innerWidth - box.width - 8))}px`;
  tip.style.top = `${below ? y + 18 : Math.max(8, y - box.height - 8)}px`;
}

function hideTip() {
  tip.hidden = true;
}

function tipOf(element) {
  const box = element.getBoundingClientRect();
  showTip(element.dataset.tip, box.left, box.bottom - 14);
  element.setAttribute("aria-describedby", "tip");
}

for (const kind of ["mouseover", "focusin"]) {
  document.addEventListener(kind, (event) => {
    const element = event.target.closest("[data-tip]");
    if (element) tipOf(element);
  });
}
for (const kind of ["mouseout", "focusout"]) {
  document.addEventListener(kind, (event) => event.target.closest("[data-tip]") && hideTip());
}
document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
addEventListener("scroll", hideTip, { passive: true });

// -- charts ----------------------------------------------------------------------------------------------------------
function rowsOf(table) {
  const names = Object.keys(table);
  return table[names[0]].map((_, i) => Object.fromEntries(names.map((name) => [name, table[name][i]])));
}

const tables = Object.fromEntries(Object.entries(data.tables).map(([name, table]) => [name, rowsOf(table)]));

function chartTip(handler, event, item, value) {
  if (value === null || value === undefined || value === "") return hideTip();
  const text = typeof value === "object" ? Object.entries(value).map(([k, v]) => `${k}: ${v}`).join("\n") : String(value);
  showTip(text, event.clientX, event.clientY);
}

// `ast`: expressions are interpreted, not compiled, so that the page needs no permission to evaluate text.
const drawing = { mode: "vega-lite", renderer: "svg", actions: false, defaultStyle: false, ast: true, tooltip: chartTip };

for (const element of document.querySelectorAll("[data-chart]")) {
  const spec = { ...data.charts[element.dataset.chart], datasets: tables };
  vegaEmbed(element, spec, { ...drawing, config: data.chart_config }).then(() => {
    const svg = element.querySelector("svg");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", element.dataset.label);
  });
}

// -- samples ---------------------------------------------------------------------------------------------------------
const number = (value, digits = 3) => (value === null || value === undefined ? "none" : value.toFixed(digits));
const signed = (value) => (value === null || value === undefined ? "none" : (value > 0 ? "+" : "") + value.toFixed(3));
// What would move or hide text is shown as its escape.
const visible = (text) =>
  text
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
      (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"))
    .replace(/\n/g, "↵\n");

function colour(completion, i, largest) {
  if (byId("colour").value === "logprob") {
    return `rgba(var(--minus), ${Math.min(1, -completion.logprobs[i] / 6) * 0.6})`;
  }
  const acts = !completion.actions || completion.actions[i];
  if (!completion.advantage || !acts || !completion.keep) return "";
  const size = Math.min(1, Math.abs(completion.advantage) / largest);
  return `rgba(var(--${completion.advantage > 0 ? "plus" : "minus"}), ${0.08 + 0.42 * size})`;
}

function tokenTip(completion, i, token) {
  const acts = !completion.actions || completion.actions[i];
  const p = Math.exp(completion.logprobs[i]);
  const place = completion.gap && i >= completion.gap[0] ? i - completion.gap[0] + completion.gap[1] : i;
  return [
    `token ${place + 1} of ${completion.length}: ${JSON.stringify(token[1])}, id ${token[0]}`,
    `sampler log-prob ${number(completion.logprobs[i])} nats (probability ${p < 0.001 ? p.toExponential(1) : p.toFixed(3)})`,
    acts ? `advantage ${signed(completion.advantage)}${completion.keep ? "" : ", not in the loss"}` : "not chosen by the policy: no advantage",
  ].join("\n");
}

function textOf(completion, largest) {
  const box = make("div", { class: "text", tabindex: "0", role: "group", "aria-label": "completion; arrow keys go from token to token" });
  if (!completion.tokens) {
    box.append(visible(completion.text));
    return box;
  }
  if (completion.tokens.length === 0) box.append(make("span", { class: "special" }, "(no token)"));
  completion.tokens.forEach((index, i) => {
    if (completion.gap && i === completion.gap[0]) {
      box.append(make("span", { class: "gap" }, ` [${completion.gap[1] - completion.gap[0]} tokens left out] `));
    }
    const token = data.tokens[index];
    const span = make("span", { "data-tip": tokenTip(completion, i, token) }, visible(token[1]) || "·");
    if (token[2]) span.classList.add("special");
    if (completion.actions && !completion.actions[i]) span.classList.add("given");
    span.style.backgroundColor = colour(completion, i, largest);
    box.append(span);
  });
  box.addEventListener("keydown", stepTokens);
  box.addEventListener("blur", () => box.querySelector(".here")?.classList.remove("here"));
  return box;
}

function stepTokens(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const tokens = [...event.currentTarget.querySelectorAll("[data-tip]")];
  const at = tokens.findIndex((token) => token.classList.contains("here"));
  const next = at < 0 ? 0 : Math.max(0, Math.min(tokens.length - 1, at + step));
  tokens[at]?.classList.remove("here");
  tokens[next]?.classList.add("here");
  if (tokens[next]) tipOf(tokens[next]);
}

function completionOf(completion, largest) {
  const facts = make("div", { class: "facts-of" });
  facts.append(`#${completion.sample}: reward `, make("b", {}, number(completion.reward)));
  facts.append(", advantage ", make("b", {}, signed(completion.advantage)));
  const more = [`${completion.length} tokens, ${completion.truncated ? "truncated" : "ended"}`];
  if (completion.drop_reason) more.push(`not in the loss: ${completion.drop_reason}`);
  if (completion.shaped !== null && completion.shaped !== completion.reward) more.push(`after shaping ${number(completion.shaped)}`);
  const parts = Object.entries(completion.components);
  for (const [name, [value, reason]] of parts) {
    if (parts.length > 1 || reason) more.push(`${name} ${number(value)}${reason ? ` (${reason})` : ""}`);
  }
  for (const line of more) facts.append(make("br"), visible(line));
  return make("div", { class: "completion" }, facts, textOf(completion, largest));
}

function groupOf(group, largest) {
  const box = make("article", { class: "group" });
  box.append(make("h3", {}, `Group ${group.group}, rank ${group.rank + 1}, mean reward ${number(group.mean)}`));
  for (const [role, text] of group.messages) {
    box.append(make("p", { class: "prompt" }, make("span", { class: "role" }, role), visible(text).replaceAll("↵\n", "\n")));
  }
  box.append(make("details", {}, make("summary", {}, "task data"), make("pre", {}, group.task)));
  for (const completion of group.completions) box.append(completionOf(completion, largest));
  if (group.completions_left_out) {
    box.append(make("p", { class: "note" }, `${group.completions_left_out} completions of this group are not in this page.`));
  }
  return box;
}

const hasSignal = (group) => group.completions.some((c) => c.keep && c.advantage);

function matches(group, words) {
  const text = [...group.messages.map((m) => m[1]), ...group.completions.map(plainText)].join("\n").toLowerCase();
  return text.includes(words.toLowerCase());
}

function plainText(completion) {
  return completion.tokens ? completion.tokens.map((index) => data.tokens[index][1]).join("") : completion.text;
}

function showSamples() {
  const shown = data.samples.find((it) => String(it.iteration) === byId("iteration").value);
  const largest = Math.max(1e-9, ...shown.groups.flatMap((g) => g.completions.map((c) => Math.abs(c.advantage ?? 0))));
  const which = byId("which").value;
  const words = byId("words").value.trim();
  let groups = shown.groups;
  if (which === "ends") groups = groups.length > 2 ? [groups[0], groups[groups.length - 1]] : groups;
  if (which === "signal") groups = groups.filter(hasSignal);
  if (words) groups = groups.filter((group) => matches(group, words));
  byId("groups").replaceChildren(...groups.map((group) => groupOf(group, largest)));
  const left = shown.groups_left_out ? `; ${shown.groups_left_out} more groups of the iteration are not in this page` : "";
  const none = shown.tokens ? "" : "; the run's tokenizer is not there, so tokens and log-probs cannot be shown";
  byId("count").textContent = `${groups.length} of ${shown.groups.length} groups${left}${none}.`;
  for (const kind of ["advantage", "logprob"]) byId(`key-${kind}`).hidden = byId("colour").value !== kind;
  byId("scale").textContent = `full colour: ${largest.toFixed(2)}`;
}

if (data.samples.length) {
  for (const it of data.samples) byId("iteration").append(make("option", { value: it.iteration }, it.iteration));
  byId("iteration").value = data.samples[data.samples.length - 1].iteration;
  for (const id of ["iteration", "which", "colour"]) byId(id).addEventListener("change", showSamples);
  byId("words").addEventListener("input", showSamples);
  if (!data.samples[data.samples.length - 1].groups.some(hasSignal)) byId("which").value = "ends";
  showSamples();
}
