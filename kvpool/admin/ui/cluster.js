// The cluster as a whole, and one node of it.

import { Problem, change, get, list, path, session } from "./api.js";
import { History, chart, hit_rate, mean_of_last, nice_bytes, summed } from "./charts.js";
import { field, h, morph, notify, open_dialog } from "./dom.js";
import { DASH, bytes, count, date_of, duration, milliseconds, percent, plural, rate } from "./format.js";
import { memory_plan } from "./memory.js";
import { numbers } from "./numbers.js";
import { bar, card, empty, heading, live, message, namespace_href, namespace_name, pairs, pill, ranking, short_key,
  state_pill, stored_bytes, table, tier_meter, tier_name, told } from "./parts.js";

const THROUGHPUT = [["Written", "put_bytes_s"], ["Read", "read_bytes_s"], ["Pulled from peers", "pulled_bytes_s"]];
const SILENT = 3; // samples without a node: it does not answer
const RANKS = 6;
const PREFIXES = 1000; // among which each namespace's hottest one is looked for
const LATELY = "No prefix was read in the last ten minutes.";
const HIT_SAMPLES = 60; // five minutes
const RANGES = { "": "All that is known", 300: "The last 5 minutes", 900: "The last 15 minutes", 1800: "The last 30 minutes", 3600: "The last hour" };

const history = new History();
const known = new Map(); // nodes seen by this page: name -> {node, at_s}

let range = ""; // of all charts, as it was chosen last

function charts(node = null) {
  const through = chart("Throughput", THROUGHPUT.map(([name, of]) => ({ name, of: summed(of, node) })),
    { shown: rate, top: 1024, nice: nice_bytes, gap: 4 });
  const hits = chart("Hit rate", [{ name: "Blocks found", of: hit_rate(node) }],
    { shown: percent, top: 1, nice: (value) => Math.max(1, value), gap: 24 });
  const chosen = h("select", { "aria-label": "Time range", onchange: () => { range = chosen.value; show(); } },
    // Not by the object's own order: it puts numbers first.
    ["", ...Object.keys(RANGES).filter(Boolean)].map((seconds) => h("option", { value: seconds, selected: seconds === range }, RANGES[seconds])));
  const show = () => {
    for (const each of [through, hits]) each.set(history.samples, history.every_s, range ? Number(range) : null);
  };
  return {
    element: h("section", { class: "charts", "aria-label": "Activity", "data-own": "", "data-key": "charts" },
      h("div", { class: "head" }, h("h2", null, "Activity"), h("div", { class: "right" }, chosen)),
      h("div", { class: "halves" }, through.element, hits.element)),
    show,
  };
}

const node_href = (name) => `#/nodes/${encodeURIComponent(name)}`;
const refresh_history = (signal) => (session.whole ? history.refresh(get, path, signal) : null);

/** Why a node is taken to be unreachable, or nothing: it is in none of the gateway's last samples, but was before. */
function silence(name) {
  const last = history.samples.slice(-SILENT);
  const missing = last.length === SILENT && last.every((sample) => !sample.nodes[name]);
  const was = history.samples.some((sample) => sample.nodes[name]);
  return missing && was ? "It has not answered for a while." : "";
}

/** How one that was seen before, and is no member any more, is called, and why. "left": it was to leave. */
function departure({ node, at_s }) {
  const seen = `last seen at ${date_of(at_s)}.`;
  return node.drain_wanted ? { lost: "left", why: `It was being drained, and has left; ${seen}` }
    : { lost: "gone", why: `No member any more; ${seen}` };
}

/** Members, and those that this page has seen before. */
function all_nodes(items) {
  const now = Date.now() / 1000;
  const shown = items.map((node) => {
    known.set(node.node, { node, at_s: now });
    const why = silence(node.node);
    return { ...node, lost: why ? "unreachable" : "", why };
  });
  const here = new Set(items.map((node) => node.node));
  for (const [name, seen] of known) {
    if (!here.has(name)) shown.push({ ...seen.node, ...departure(seen) });
  }
  return shown.sort((one, other) => one.node.localeCompare(other.node, "en", { numeric: true }));
}

export function cluster_view(root) {
  const drawn = charts();
  const plan = memory_plan();
  const view = live(root, async (signal) => {
    const hot = (by, limit) => get(path(["hot"], { by, limit }), signal);
    const [cluster, nodes, , spaces, prefixes, tenants, engines, memory] = await Promise.all([
      get(path(["cluster"]), signal), list(["nodes"], {}, { signal }), refresh_history(signal),
      list(["namespaces"], {}, { signal }), hot("prefix", PREFIXES), hot("tenant", RANKS), list(["engines"], {}, { signal }),
      get(path(["memory"]), signal),
    ]);
    return { cluster, nodes, spaces, prefixes: prefixes.items, tenants: tenants.items, engines, memory };
  }, (data) => {
    session.cluster = data.cluster; // a gateway that was started anew may know routers
    const nodes = all_nodes(data.nodes);
    queueMicrotask(drawn.show);
    return [
      heading("Cluster", { after: [standing_pill(data.cluster)] }),
      tiles(nodes),
      h("section", { "aria-label": "Nodes", class: "grid" }, nodes.map(node_card)),
      session.whole ? drawn.element : null,
      plan(data.memory),
      ranked(data),
    ];
  }, { head: () => heading("Cluster") });
  return view.stop;
}

/** How the node that was asked stands to the membership, where that is not as it should be. */
function standing_pill({ standing }) {
  return standing === "member" || standing === "alone" ? null : state_pill(standing);
}

const latest = (of) => (history.samples.length ? of(history.samples.at(-1)) : null);

function tiles(nodes) {
  const living = nodes.filter((node) => !node.lost);
  const serving = living.filter((node) => node.state === "serving").length;
  const versions = [...new Set(living.map((node) => node.version))].sort();
  const sum = (tier, of) => living.flatMap((node) => node.tiers ?? []).filter((each) => each.name === tier)
    .reduce((total, each) => total + of(each), 0);
  const tier = (name) => {
    const [used, capacity, secondary] = [stored_bytes, (each) => each.capacity_bytes, (each) => each.secondary_bytes].map((of) => sum(name, of));
    const part = secondary ? `; ${bytes(secondary)} of it secondary replicas` : "";
    return capacity ? tile(`${tier_name(name)} in use`, bytes(used), `${percent(used / capacity)} of ${bytes(capacity)}${part}`)
      : tile(tier_name(name), DASH, "no node has any");
  };
  const moved = (name) => rate(latest(summed(name)));
  const wanted = nodes.filter((node) => node.lost !== "left").length;
  const first = tile("Nodes serving", `${serving} of ${wanted}`,
    `${versions.length > 1 ? "versions" : "version"} ${versions.join(", ") || DASH}`);
  if (!session.whole) return h("dl", { class: "tiles" }, first); // the others are of all tenants together
  return h("dl", { class: "tiles" },
    first,
    tier("dram"), tier("ssd"),
    tile("Hit rate", percent(mean_of_last(history.samples, HIT_SAMPLES, hit_rate())), "of the last 5 minutes"),
    tile("Read", moved("read_bytes_s"), "by engines"),
    tile("Written", moved("put_bytes_s"), `${moved("pulled_bytes_s")} pulled`));
}

const tile = (name, value, sub) => h("div", { class: "tile" }, h("dt", null, name), h("dd", null, value), h("dd", { class: "sub" }, sub));

function node_card(node) {
  const now = (name) => rate(latest(summed(name, node.node)));
  const labels = Object.entries(node.labels ?? {}).map(([name, value]) => `${name} ${value}`);
  const told_rates = session.whole && !node.lost;
  return h("article", { class: `card node ${node.lost && node.lost !== "left" ? "lost" : ""}`, "data-key": node.node },
    h("div", { class: "head" }, h("h2", null, h("a", { href: node_href(node.node) }, node.node)),
      h("div", { class: "right" }, state_pill(node.lost || node.state))),
    node.lost ? h("p", { class: "small" }, node.why) : null,
    (node.tiers ?? []).filter((tier) => tier.capacity_bytes || tier.name === "dram").map(tier_meter),
    node.drain ? drain_line(node.drain) : null,
    h("p", { class: "facts" },
      [...labels, plural(node.engines.length, "engine"), `kvpool ${node.version || DASH}`,
        told_rates ? `read ${now("read_bytes_s")}` : null, told_rates ? `written ${now("put_bytes_s")}` : null]
        .filter(Boolean).map((each) => h("span", null, each))));
}

function drain_line(drain) {
  const share = drain.blocks_total ? drain.blocks / drain.blocks_total : drain.phase === "done" ? 1 : 0;
  const left = drain.left || drain.failed ? `, ${count((drain.left ?? 0) + (drain.failed ?? 0))} left behind` : "";
  return h("div", { class: "meter" },
    h("span", null, `Draining: ${drain.phase}`),
    h("span", { class: "of" }, `${count(drain.blocks)} of ${plural(drain.blocks_total, "block")}, ${bytes(drain.copied_bytes)} copied${left}`),
    bar(share, "Drain: share of blocks looked at", "other"));
}

/** What is read most, and the engines that read. */
function ranked({ prefixes, tenants, spaces, engines }) {
  const names = new Map(spaces.map((space) => [`${space.tenant}/${space.digest}`, namespace_name(space)]));
  const whose = (each) => `${each.tenant}/${each.namespace}`;
  const name = (each) => names.get(whose(each)) ?? each.namespace;
  const reads = (value) => plural(value < 10 ? Number(value.toFixed(1)) : Math.round(value), "read");
  // Prefixes contain each other, so their reads cannot be summed up: a namespace is as hot as its hottest one.
  const hottest = new Map();
  for (const each of prefixes) if (!hottest.has(whose(each))) hottest.set(whose(each), each);
  const namespaces = [...hottest.values()].slice(0, RANKS);
  const busy = tenants.filter((each) => each.read_bytes_s > 0);
  return h("div", { class: "halves" },
    card("Hottest prefixes", ranking(prefixes.slice(0, RANKS).map((each) => ({
      key: `${whose(each)}/${each.key}`, name: short_key(each.key), note: `${plural(each.blocks, "block")} of ${name(each)}`,
      href: `#/blocks/${encodeURIComponent(each.tenant)}/${each.namespace}/${each.key}`, value: each.reads, shown: reads(each.reads),
    })), LATELY)),
    card("Hottest namespaces", ranking(namespaces.map((each) => ({
      key: whose(each), name: name(each), note: each.tenant, href: namespace_href({ tenant: each.tenant, digest: each.namespace }),
      value: each.reads, shown: `${reads(each.reads)} of one prefix`,
    })), LATELY)),
    card("Hottest tenants", ranking(busy.map((each) => ({
      key: each.tenant, name: each.tenant, value: each.read_bytes_s, shown: rate(each.read_bytes_s),
    })), "Nothing was read in the last minute.")),
    card("Engines", engines.length ? h("ul", { class: "ranks" }, engines.slice(0, RANKS).map((each) => h("li", { "data-key": each.name },
      h("span", null, each.name, " ", h("span", { class: "quiet small" }, each.model || each.url)),
      h("span", { class: "nowrap" }, each.node ? h("a", { href: node_href(each.node) }, each.node) : h("span", { class: "quiet" }, "told by a router"))))) : empty("No engine has been announced."),
    engines.length > RANKS ? h("p", { class: "quiet small" }, `and ${count(engines.length - RANKS)} more`) : null));
}

// ---- one node ----------------------------------------------------------------------------------------

export function node_view(root, name) {
  const drawn = charts(name);
  const crumb = { href: "#/cluster", text: "Cluster" };
  const view = live(root, async (signal) => {
    try {
      const [detail, engines] = await Promise.all([
        get(path(["nodes", name]), signal),
        list(["engines"], {}, { signal }), refresh_history(signal),
      ]);
      known.set(name, { node: detail.node, at_s: Date.now() / 1000 });
      return { ...detail, engines: engines.filter((engine) => engine.node === name) };
    } catch (problem) {
      // 400: no node can be called so.
      if (problem instanceof Problem && [400, 404].includes(problem.status)) return { node: null };
      throw problem;
    }
  }, ({ node, uptime_s, sections, engines }) => {
    if (node === null) return no_member(name, crumb, () => view.now());
    const why = silence(name);
    queueMicrotask(drawn.show);
    return [
      heading(name, { crumb,
        after: [state_pill(why ? "unreachable" : node.state), pill(`kvpool ${node.version || DASH}`)],
        actions: drain_actions(node, () => view.now()) }),
      why ? message(why, "warn") : null,
      h("div", { class: "halves" },
        card("Tiers", node.tiers.length ? node.tiers.map(tier_meter) : empty("A token for all tenants is needed to see them."),
          node.drain ? drain_line(node.drain) : null),
        card("About", pairs([
          ["Incarnation", h("code", null, node.incarnation || DASH)],
          ["Addresses", node.transports.map((each) => each.url).join(", ") || DASH],
          ["Labels", Object.entries(node.labels).map(([label, value]) => `${label}=${value}`).join(", ") || "none"],
          ["Protocol", String(node.protocol || DASH)],
          ["Running for", duration(uptime_s)],
        ]))),
      session.whole ? drawn.element : null,
      session.whole ? sources(sections.fetch?.peers ?? []) : null,
      card("Engines", engine_table(engines)),
      card("DRAM by tenant", memory(sections.tenants ?? {})),
      numbers(sections),
    ];
  }, { head: () => heading(name, { crumb }) });
  return view.stop;
}

/** In place of a node that is not there, or not any more. One that was drained can be brought back. */
function no_member(name, crumb, again) {
  const seen = known.get(name);
  const { lost, why } = seen ? departure(seen) : { lost: "unknown", why: `No node of this cluster is called ${name}.` };
  return [
    heading(name, { crumb, after: [state_pill(lost)], actions: lost === "left" ? drain_actions(seen.node, again) : [] }),
    message(why, lost === "left" ? "" : "warn"),
  ];
}

/** Where it loads blocks from: other nodes, and tiers below its memory, which have no incarnation. */
function sources(all) {
  const own = all.filter((each) => !each.incarnation);
  return [
    card("Links to other nodes", links("Links", [
      { name: "Node", head: true, of: (link) => (link.node ? h("a", { href: node_href(link.node) }, link.node) : link.url) },
      { name: "Distance", of: (link) => link.distance || DASH },
    ], all.filter((each) => each.incarnation), "No other node is known here.")),
    own.length ? card("Loads from lower tiers", links("Lower tiers", [
      { name: "From", head: true, of: (source) => source.node.replace(/^ssd\b/, "SSD").replace(/^[a-z]/, (letter) => letter.toUpperCase()) },
    ], own, "")) : null,
  ];
}

function links(caption, first, items, none) {
  return table(caption, [
    ...first,
    { name: "Answers in", num: true, of: (link) => [milliseconds(link.latency_ms / 1000), link.measured ? null : h("span", { class: "quiet" }, " assumed")] },
    { name: "Throughput", num: true, of: (link) => [rate(link.bytes_s), link.measured ? null : h("span", { class: "quiet" }, " assumed")] },
    { name: "Loaded", num: true, of: (link) => bytes(link.bytes) },
    { name: "Asked", num: true, of: (link) => count(link.asked) },
    { name: "Failed", num: true, of: (link) => count(link.failed) },
    { name: "State", class: "name", of: (link) => [state_pill(link.suspended_s > 0 ? "suspended" : link.suspected ? "suspected" : "ok"),
      link.suspended_s > 0 && link.last_error ? h("p", { class: "small" }, link.last_error) : null] },
  ], items, { none, key: (link) => link.incarnation || link.node });
}

function engine_table(engines) {
  return table("Engines", [
    { name: "Engine", head: true, of: (engine) => engine.name },
    { name: "Model", class: "name", of: (engine) => engine.model || DASH },
    { name: "Role", of: (engine) => engine.role || DASH },
    { name: "Tenant", of: (engine) => engine.tenant || DASH },
    { name: "Routers", class: "name", of: (engine) => Object.entries(engine.routers)
      .map(([url, said]) => `${url}: ${said.state ?? "known"}`).join("; ") || DASH },
    { name: "Address", of: (engine) => h("code", null, engine.url) },
  ], engines, { none: "No engine has been announced on this node.", key: (engine) => engine.name });
}

function memory(tenants) {
  const segments = Object.entries(tenants).map(([tenant, { space, secondary_bytes }]) => ({ tenant, secondary_bytes, ...space }));
  return table("DRAM by tenant", [
    { name: "Tenant", head: true, of: (each) => each.tenant },
    { name: "Segment", num: true, of: (each) => bytes(each.size) },
    { name: "Used", num: true, of: (each) => bytes(each.bytes_used) },
    { name: "Secondary", num: true, of: (each) => bytes(each.secondary_bytes) },
    { name: "Fill", of: (each) => h("span", { class: "nowrap" }, bar(each.bytes_used / each.size, "Fill", "inline", each.secondary_bytes / each.size),
      ` ${percent(each.bytes_used / each.size)}`) },
    { name: "Slots by size", class: "name", of: (each) => each.classes.map((one) =>
      `${bytes(one.stride)}: ${count(one.slots_used)} of ${count(one.slots_used + one.slots_free)}`).join("; ") || DASH },
    { name: "Unassigned", num: true, of: (each) => bytes(each.bytes_unassigned) },
  ], segments, { none: "No tenant has memory on this node.", key: (each) => each.tenant });
}

// ---- draining ----------------------------------------------------------------------------------------

function drain_actions(record, again) {
  if (!session.may("operator") || !session.whole) return [];
  if (record.drain_wanted) {
    return [h("button", { type: "button", onclick: () => undrain(record.node, again) }, "Take the drain back")];
  }
  return [h("button", { type: "button", onclick: () => drain_dialog(record.node, again) }, "Drain…")];
}

async function undrain(node, again) {
  try {
    await change("POST", path(["operator", "drain"]), { node, wanted: false });
    notify(`The drain of ${node} is taken back.`);
    again();
  } catch (problem) {
    notify(told(problem), "bad");
  }
}

function drain_dialog(node, again) {
  open_dialog(`Drain ${node}?`, (dialog) => {
    const typed = h("input", { type: "text", autocomplete: "off", spellcheck: "false", autocapitalize: "off" });
    const go = h("button", { type: "submit", class: "danger", disabled: true }, "Drain");
    const answer = h("div", null);
    typed.oninput = () => {
      go.disabled = typed.value !== node;
    };
    queueMicrotask(() => {
      dialog.querySelector("form").onsubmit = async (event) => {
        event.preventDefault();
        if (typed.value !== node) return;
        go.disabled = true;
        try {
          await change("POST", path(["operator", "drain"]), { node }, dialog.aborted);
          dialog.close();
          notify(`${node} is being drained.`);
          again();
        } catch (problem) {
          if (dialog.aborted.aborted) return;
          morph(answer, message(told(problem), "bad"));
          go.disabled = false;
        }
      };
      typed.focus();
    });
    return [
      h("p", null, "Blocks that only this node holds are copied to others, nothing new is placed here, and then the node leaves the cluster. It can be taken back until then."),
      field(`Type ${node} to confirm`, typed),
      answer,
      h("div", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), go),
    ];
  });
}
