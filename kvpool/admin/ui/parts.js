// Pieces that several views are made of.

import { Problem, poll } from "./api.js";
import { h, morph } from "./dom.js";
import { bytes, percent } from "./format.js";

const STATES = {
  serving: "good", member: "good", done: "good", closed: "good", ok: "good", drained: "good",
  joining: "accent", running: "accent", "in flight": "accent",
  draining: "warn", cancelled: "warn", suspended: "warn", suspected: "warn", half_open: "warn", rejected: "warn",
  unreachable: "bad", gone: "bad", failed: "bad", away: "bad", open: "bad", error: "bad",
};

export const state_pill = (state) => h("span", { class: `pill ${STATES[state] ?? ""}` }, state || "unknown");
export const pill = (text, kind = "") => h("span", { class: `pill plain ${kind}` }, text);
export const empty = (text) => h("p", { class: "empty" }, text);
export const message = (text, kind = "") => h("p", { class: `message ${kind}`, role: kind === "bad" ? "alert" : null }, text);

/** A heading and what can be done there. */
export function heading(title, { crumb = null, after = [], actions = [] } = {}) {
  return h("div", { class: "head" },
    crumb && h("p", { class: "crumb" }, h("a", { href: crumb.href }, crumb.text)),
    h("h1", { tabindex: "-1" }, title), after, actions.some(Boolean) ? h("div", { class: "right" }, actions) : null);
}

export function card(title, ...children) {
  return h("section", { class: "card", "aria-label": title }, h("div", { class: "head" }, h("h2", null, title)), children);
}

/** Columns: [{name, of(item), num, head}]. head: the cell names its row. */
export function table(caption, columns, items, { none = "Nothing here.", key = null, row = null } = {}) {
  if (!items.length) return empty(none);
  const of = (column, item) => {
    const props = { class: [column.num ? "num" : "", column.class ?? ""].join(" ").trim() || null };
    return column.head ? h("th", { scope: "row", ...props }, column.of(item)) : h("td", props, column.of(item));
  };
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${caption}, table` },
    h("table", null, h("caption", { class: "hidden-text" }, caption),
      h("thead", null, h("tr", null, columns.map((column) => h("th", { scope: "col", class: column.num ? "num" : null },
        column.name || h("span", { class: "hidden-text" }, "Actions"))))),
      h("tbody", null, items.map((item) => h("tr", { "data-key": key?.(item) ?? null, class: row?.(item) || null },
        columns.map((column) => of(column, item)))))));
}

const TIERS = { gpu: "Engines' GPU", device: "Spare GPU", dram: "DRAM", ssd: "SSD", object: "Object storage" };
export const tier_name = (name) => TIERS[name] ?? name;

/** All that a tier of a node holds. The API tells secondary replicas apart from what is in use. */
export const stored_bytes = ({ used_bytes: used = 0, secondary_bytes: secondary = 0 }) => used + secondary;

/** How full a tier is, and how much of that are secondary replicas: the bar's second part. */
export function tier_meter(tier) {
  const { name, capacity_bytes: capacity = 0, secondary_bytes: secondary = 0 } = tier;
  const used = stored_bytes(tier);
  const label = tier_name(name);
  if (!capacity) {
    return h("div", { class: "meter" }, h("span", null, label), h("span", { class: "of" }, used ? bytes(used) : "none"));
  }
  const kind = name === "dram" ? "" : name === "ssd" ? "ssd" : "other"; // a full one is as it should be: it is a cache
  return h("div", { class: "meter" },
    h("span", null, label), h("span", { class: "of" }, `${bytes(used)} of ${bytes(capacity)}, ${percent(used / capacity)}`),
    bar(used / capacity, `${label}: share in use`, kind, secondary / capacity),
    secondary > 0 ? h("span", { class: "of whole" }, h("i", { class: "swatch", "aria-hidden": "true" }),
      `${bytes(secondary)} of it secondary replicas`) : null);
}

/** A share as a bar. secondary: the part of it, of the same whole, that is drawn lighter at its end. */
export function bar(share, label, kind = "", secondary = 0) {
  const value = Math.max(0, Math.min(1, share || 0));
  const lighter = Math.max(0, Math.min(value, secondary || 0));
  return h("div", { class: `bar ${kind}`, role: "meter", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100",
    "aria-valuenow": (value * 100).toFixed(1), "aria-valuetext": percent(value) },
    h("i", { style: { "--share": `${(value - lighter) * 100}%`, "--least": value > lighter ? "3px" : "0px" } }),
    lighter > 0 ? h("i", { class: "secondary", style: { "--share": `${lighter * 100}%` } }) : null);
}

/** Names with numbers, longest bar first. items: [{key, name, href, note, value, shown}]. */
export function ranking(items, none) {
  if (!items.length) return empty(none);
  const most = Math.max(...items.map((item) => item.value), 1e-9);
  return h("ol", { class: "ranks" }, items.map((item) => h("li", { "data-key": item.key },
    h("span", null, item.href ? h("a", { href: item.href }, item.name) : item.name,
      item.note ? [" ", h("span", { class: "quiet small" }, item.note)] : null),
    h("span", { class: "nowrap" }, item.shown),
    h("div", { class: "bar", "aria-hidden": "true", style: { "grid-column": "1 / -1" } },
      h("i", { style: { "--share": `${(item.value / most) * 100}%` } })))));
}

export function pairs(entries) {
  return h("dl", { class: "pairs" }, entries.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", { class: typeof value === "string" && value.length > 24 ? "long" : null }, value))));
}

export const short_key = (key) => h("code", { class: "nowrap", title: key }, key.length > 14 ? `${key.slice(0, 6)}…${key.slice(-6)}` : key);

/** How people call a namespace: its model, and what sets it apart. */
export function namespace_name(namespace) {
  return String(namespace.fields.model || namespace.digest);
}

export const namespace_href = ({ tenant, digest }) => `#/namespaces/${encodeURIComponent(tenant)}/${digest}`;

/** Keeps a view true: load(signal) every few seconds, draw(data) into root. What fails is told above what was there.
 *  head(): what is shown in place of data that could not be had. Returns {stop, now, show}: show() draws again what
 *  was loaded last. */
export function live(root, load, draw, { head = () => null, every_ms } = {}) {
  const trouble = h("div", null);
  const content = h("div", { class: "live" });
  content.style.display = "contents";
  trouble.style.display = "contents";
  root.replaceChildren(trouble, content);
  let data;
  const show = () => data !== undefined && morph(content, draw(data));
  const stop = poll(async (signal) => {
    const found = await load(signal);
    if (signal.aborted) return;
    data = found;
    morph(trouble);
    show();
  }, (problem) => {
    const kept = data === undefined ? "" : "What is shown below is older.";
    morph(trouble, message(sentences(told(problem), kept), problem.status === 0 ? "warn" : "bad"));
    if (data === undefined) morph(content, head());
  }, every_ms);
  return { stop, now: stop.now, show };
}

export function told(problem) {
  if (!(problem instanceof Problem)) throw problem;
  const detail = problem.message === problem.title ? "" : problem.message;
  return [problem.title, detail].filter(Boolean).join(": ");
}

/** One after the other; what a gateway tells ends without a full stop mostly. */
function sentences(first, second) {
  if (!second) return first;
  return `${first}${/[.!?]$/.test(first) ? "" : "."} ${second}`;
}

/** Have a dialog's form call `act`; what that throws is said in `answer`. changed: sees to what `go` offers, at first too. */
export function on_submit(dialog, { go, answer, changed, act }) {
  queueMicrotask(() => {
    changed();
    dialog.querySelector("form").onsubmit = async (event) => {
      event.preventDefault();
      if (go.disabled) return;
      go.disabled = true;
      try {
        await act();
      } catch (problem) {
        if (dialog.aborted.aborted) return;
        morph(answer, message(told(problem), "bad"));
        go.disabled = false;
      }
    };
  });
}

export function unreachable_note(unreachable) {
  const names = Object.entries(unreachable ?? {});
  if (!names.length) return null;
  return message(`Not counted: ${names.map(([node, why]) => `${node} (${why})`).join("; ")}`, "warn");
}
