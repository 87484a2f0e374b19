// What can be set: a namespace's settings, for the whole cluster, and those of each node's daemon.

import { change, get, list, path, session } from "./api.js";
import { field, h, morph, notify, open_dialog } from "./dom.js";
import { DASH, bytes, count, duration, percent, title_of } from "./format.js";
import { heading, live, message, on_submit, pill, table } from "./parts.js";

// ---- a namespace's -------------------------------------------------------------------------------------

const SETTING_NAMES = {
  replicas: "Replicas", write: "Written to SSD", ttl_s: "Kept unused for", ssd_codec: "Codec on SSD",
  dram_quota: "DRAM quota", ssd_quota: "SSD quota", write_remote: "Written to object storage",
};

function shown(name, value) {
  if (name === "ttl_s") return value ? duration(value) : "no limit";
  if (name.endsWith("_quota")) return !value ? "the tenant's" : value <= 1 && !Number.isInteger(value) ? percent(value) : bytes(value);
  if (name === "ssd_codec") return value || "none";
  return value === "" || value === null ? "as each node does" : String(value);
}

export const setting_rows = (settings) => Object.entries(settings).map(([name, value]) => [SETTING_NAMES[name] ?? title_of(name), shown(name, value)]);

export const configure_button = (space, again) => (session.may("admin")
  ? h("button", { type: "button", onclick: () => configure_dialog(space, again) }, "Configure…") : null);

const CHOICES = {
  write: { "": "as each node does", back: "back: before eviction", through: "through: after the put", none: "none" },
  ssd_codec: { "": "none", blosc2: "blosc2" },
  write_remote: { "": "as each node does", back: "back: before eviction", none: "none" },
};
const HINTS = {
  replicas: "Nodes that should hold each block.", ttl_s: "30s, 15m, 12h, 7d; 0: no limit.",
  dram_quota: "On each node, of the tenant's part: 20%, 50GiB; 0: no quota.", ssd_quota: "The same on disks.",
};
const SECONDS = { s: 1, m: 60, h: 3600, d: 86400 };
const SIZES = { "": 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };

/** A value as it is typed, so that parse() gives the same. */
function typed(name, value) {
  if (name === "ttl_s") return value ? `${value}s` : "0";
  if (name.endsWith("_quota")) return value > 0 && value <= 1 ? `${value * 100}%` : String(value);
  return String(value);
}

/** What was typed; undefined: it is no value. */
function parse(name, text) {
  if (name in CHOICES) return text;
  const [, number, unit] = /^(\d+(?:\.\d+)?)\s*([A-Za-z%]*)$/.exec(text.trim()) ?? [];
  if (number === undefined) return undefined;
  const value = Number(number);
  if (name === "replicas") return unit || !Number.isInteger(value) || value < 1 ? undefined : value;
  if (name === "ttl_s") return unit ? value * SECONDS[unit] : value === 0 ? 0 : NaN;
  if (unit === "%") return value <= 100 ? value / 100 : undefined;
  return Math.round(value * SIZES[unit]);
}

function configure_dialog({ tenant, digest, settings }, again) {
  open_dialog("Configure the namespace", (dialog) => {
    const controls = Object.fromEntries(Object.entries(settings).map(([name, value]) => [name, name in CHOICES
      ? h("select", null, Object.entries(CHOICES[name]).map(([each, text]) => h("option", { value: each, selected: each === value }, text)))
      : h("input", { type: "text", value: typed(name, value), autocomplete: "off", spellcheck: "false" })]));
    const answer = h("div", { role: "status", "aria-live": "polite" });
    const go = h("button", { type: "submit", class: "danger" }, "Configure");
    let changes = {};
    const changed = () => {
      const found = Object.entries(controls).map(([name, control]) => [name, parse(name, control.value)]);
      const bad = found.filter(([, value]) => value === undefined || Number.isNaN(value)).map(([name]) => SETTING_NAMES[name]);
      changes = Object.fromEntries(found.filter(([name, value]) => value !== settings[name]));
      go.disabled = bad.length > 0 || !Object.keys(changes).length;
      morph(answer, bad.length ? message(`Not understood: ${bad.join(", ")}.`, "warn")
        : go.disabled ? message("Nothing is changed yet.") : message(["On all nodes: ", Object.entries(changes)
          .map(([name, value]) => `${SETTING_NAMES[name]}: ${shown(name, settings[name])} → ${shown(name, value)}`).join("; ")], "warn"));
    };
    for (const control of Object.values(controls)) {
      control.onchange = changed;
      control.oninput = changed;
    }
    on_submit(dialog, {
      go, answer, changed,
      async act() {
        await change("PATCH", path(["namespaces", digest], { tenant }), changes, dialog.aborted);
        dialog.close();
        notify("The namespace is configured anew, on all nodes.");
        again();
      },
    });
    return [
      h("div", { class: "both" }, Object.entries(controls).map(([name, control]) => field(SETTING_NAMES[name] ?? title_of(name), control, HINTS[name]))),
      answer,
      h("div", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), go),
    ];
  });
}

// ---- a node's daemon -----------------------------------------------------------------------------------

export function settings_view(root, wanted = "") {
  const words = h("input", { type: "search", "aria-label": "Show only settings with", placeholder: "Show only settings with…", oninput: () => view.show() });
  const node = h("select", { "aria-label": "Node", onchange: () => { location.hash = `#/settings/${encodeURIComponent(node.value)}`; } });
  const head = h("div", { class: "head", "data-own": "", "data-key": "head" }, h("h1", { tabindex: "-1" }, "Settings"),
    h("div", { class: "right filters" }, words, node));
  const view = live(root, async (signal) => {
    const nodes = await list(["nodes"], {}, { signal });
    const shown_node = wanted || session.cluster.node;
    const found = await get(path(["config"], { node: shown_node }), signal);
    return { nodes, shown_node, items: found.nodes[shown_node] ?? [] };
  }, ({ nodes, shown_node, items }) => {
    morph(node, nodes.map((each) => h("option", { value: each.node, selected: each.node === shown_node }, each.node)));
    const text = words.value.trim().toLowerCase();
    const shown = items.filter((each) => `${each.name} ${each.help}`.toLowerCase().includes(text))
      .sort((one, other) => Number(other.changeable) - Number(one.changeable));
    return [
      head,
      h("p", { class: "quiet" }, "As the daemon of this node runs with them. Those that can be changed while it runs come first; a change holds until it ends, and what is to stay belongs into its file."),
      h("section", { class: "card", "aria-label": "Settings" }, table("Settings", [
        { name: "Setting", head: true, of: (each) => h("code", null, each.name.split("_").flatMap((word, n) => (n ? ["_", h("wbr", null), word] : [word]))) },
        { name: "Value", class: "name", of: (each) => value_of(each) },
        { name: "Change", of: (each) => (!each.changeable ? h("span", { class: "quiet" }, "in its file")
          : session.may("admin") ? h("button", { type: "button", class: "small", "aria-label": `Change ${each.name}`,
            onclick: () => change_dialog(each, shown_node, () => view.now()) }, "Change…") : pill("while it runs")) },
        { name: "What it is", class: "name wide", of: (each) => each.help || DASH },
      ], shown, { none: "No setting has this in it.", key: (each) => each.name })),
    ];
  }, { head: () => heading("Settings") });
  return view.stop;
}

/** A value as its file would have it, mostly. */
function value_of({ value, secret, form }) {
  if (secret) return value ? "set" : "not set";
  if (value === "" || value === null || (Array.isArray(value) && !value.length)) return "none";
  if (typeof value === "boolean") return String(value);
  if (form === "SIZE" && typeof value === "number") return value ? bytes(value) : "0";
  if (form === "MODE" && typeof value === "number") return value.toString(8);
  if (form === "SECONDS" && typeof value === "number") return duration(value);
  if (typeof value === "number") return Number.isInteger(value) ? count(value) : String(value);
  if (Array.isArray(value)) return value.map((each) => plain(each)).join(", ");
  return plain(value) || "none";
}

/** A table, or a part of one, in a line. */
const plain = (value) => (value !== null && typeof value === "object"
  ? Object.entries(value).map(([name, each]) => `${name} ${plain(each)}`).join(" ") : String(value));

/** A value as it is typed. */
function text_of({ value, form }) {
  if (form !== "SIZE" || typeof value !== "number" || !value) return String(value);
  const [unit, nbytes] = Object.entries(SIZES).filter(([name]) => /^(|.iB)$/.test(name)).findLast(([, each]) => value % each === 0);
  return `${value / nbytes}${unit}`;
}

function change_dialog(setting, node, again) {
  const written = text_of(setting);
  open_dialog(`Change ${setting.name}`, (dialog) => {
    const choices = setting.form.includes("|") ? setting.form.split("|") : typeof setting.value === "boolean" ? ["true", "false"] : null;
    const value = choices ? h("select", null, choices.map((each) => h("option", { value: each, selected: each === String(setting.value) }, each)))
      : h("input", { type: "text", value: written, autocomplete: "off", spellcheck: "false" });
    const where = h("select", null, h("option", { value: node }, `${node} only`), h("option", { value: "" }, "All nodes"));
    const answer = h("div", { role: "status", "aria-live": "polite" });
    const go = h("button", { type: "submit", class: "danger" }, "Change");
    const changed = () => {
      const same = value.value.trim() === written && where.value !== "";
      go.disabled = same || !value.value.trim();
      morph(answer, go.disabled ? null : message(`${setting.name}: ${value_of(setting)} → ${value.value.trim()}, on ${where.value || "all nodes"}, until their daemons end.`, "warn"));
    };
    value.oninput = changed;
    value.onchange = changed;
    where.onchange = changed;
    on_submit(dialog, {
      go, answer, changed,
      async act() {
        const done = await change("PATCH", path(["config"], { node: where.value }), { changes: { [setting.name]: value.value.trim() } }, dialog.aborted);
        dialog.close();
        const silent = Object.entries(done.unreachable).map(([name, why]) => `; not on ${name}: ${why}`);
        notify(`${setting.name} is changed on ${Object.keys(done.nodes).join(", ")}${silent.join("")}.`, silent.length ? "bad" : "");
        again();
      },
    });
    return [
      h("p", { class: "quiet" }, setting.help ? `${setting.help}.` : ""),
      field("Value", value, setting.form === "SIZE" ? "Bytes, or with a unit: 64MiB, 10GiB." : null),
      field("Where", where),
      answer,
      h("div", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), go),
    ];
  });
}
