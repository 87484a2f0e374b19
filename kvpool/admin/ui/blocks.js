// What the pool holds: namespaces and their blocks, and pins.

import { change, get, path, session } from "./api.js";
import { field, h, morph, notify, open_dialog } from "./dom.js";
import { DASH, ago, bytes, count, duration, plural, title_of } from "./format.js";
import { TIERS, evict_button, fill, keys_box, node_options, parse_keys, warm_button } from "./jobs.js";
import { card, heading, live, message, namespace_href, namespace_name, on_submit, pairs, pill, short_key, table, tier_name, told,
  unreachable_note } from "./parts.js";
import { configure_button, setting_rows } from "./settings.js";

const PAGE = 100;
const KEY = /^[0-9a-f]{32}$/;
const PINS = { soft: "soft: evicted last", hard: "hard: never evicted", none: "none: evicted like any other" };

/** Blocks and bytes in memory of a namespace, of all nodes that tell. A block's parts lie together mostly: counted are
 *  those of the part that has most. */
function held({ nodes }) {
  const each = Object.values(nodes);
  const blocks = each.reduce((sum, on) => sum + Math.max(0, ...on.blocks), 0);
  return { blocks, nbytes: each.reduce((sum, on) => sum + on.held_bytes, 0) };
}

export function namespaces_view(root) {
  const view = live(root, (signal) => get(path(["namespaces"], { limit: 1000 }), signal), ({ items: spaces, next: more, unreachable }) => [
    heading("Namespaces", { actions: [evict_button(null)] }),
    unreachable_note(unreachable),
    h("p", { class: "quiet" }, "Blocks of one namespace are exchangeable: the same model, layout, hashing and tenant."),
    h("section", { class: "card", "aria-label": "Namespaces" }, table("Namespaces", [
      { name: "Model", head: true, class: "name", of: (space) => h("a", { href: namespace_href(space) }, namespace_name(space)) },
      { name: "Tenant", of: (space) => space.tenant },
      { name: "Digest", of: (space) => short_key(space.digest) },
      { name: "Blocks in memory", num: true, of: (space) => count(held(space).blocks) },
      { name: "Bytes", num: true, of: (space) => bytes(held(space).nbytes) },
      { name: "Replicas", num: true, of: (space) => count(space.settings.replicas) },
      { name: "Kept for", num: true, of: (space) => (space.settings.ttl_s ? duration(space.settings.ttl_s) : "no limit") },
      { name: "Epoch", num: true, of: (space) => count(space.epoch) },
    ], spaces, { none: "No namespace yet: an engine opens one when it connects.", key: (space) => `${space.tenant}/${space.digest}` }),
    more ? h("p", { class: "quiet small" }, "The first 1,000 are shown.") : null),
  ], { head: () => heading("Namespaces") });
  return view.stop;
}

// ---- one namespace -----------------------------------------------------------------------------------

export function namespace_view(root, tenant, digest) {
  const blocks = block_list(tenant, digest);
  const crumb = { href: "#/namespaces", text: "Namespaces" };
  const view = live(root, (signal) => get(path(["namespaces", digest], { tenant }), signal), (space) => {
    const { blocks: number, nbytes } = held(space);
    return [
      heading(namespace_name(space), { crumb,
        after: [pill(`${plural(number, "block")} in memory`), pill(bytes(nbytes))],
        actions: [configure_button(space, () => view.now()), pin_button(space), warm_button(space), evict_button(space)] }),
      h("div", { class: "halves" },
        card("Settings", pairs(setting_rows(space.settings))),
        card("What must agree", pairs([["Digest", h("code", null, digest)], ["Tenant", space.tenant],
          ["Epoch", count(space.epoch)],
          ...Object.entries(space.fields).map(([name, value]) => [title_of(name),
            typeof value === "object" ? JSON.stringify(value) : String(value)])]))),
      by_nodes(space),
      blocks,
    ];
  }, { head: () => heading(h("code", null, digest), { crumb }) });
  return view.stop;
}

function by_nodes({ nodes, unreachable }) {
  const items = Object.entries(nodes).map(([node, on]) => ({ node, ...on }));
  return card("In memory, by node", unreachable_note(unreachable), table("In memory, by node", [
    { name: "Node", head: true, of: (on) => h("a", { href: `#/nodes/${encodeURIComponent(on.node)}` }, on.node) },
    { name: "Blocks", num: true, of: (on) => count(Math.max(0, ...on.blocks)) },
    { name: "Bytes", num: true, of: (on) => bytes(on.held_bytes) },
    { name: "Quota", num: true, of: (on) => (on.quota_bytes ? bytes(on.quota_bytes) : "the tenant's") },
  ], items, { none: "No node has it open.", key: (on) => on.node }));
}

/** Blocks of a namespace, a page at a time; asked for when wanted, not every few seconds. */
function block_list(tenant, digest) {
  const tier = h("select", { "aria-label": "Tier" }, h("option", { value: "" }, "All tiers"), TIERS.map((name) => h("option", { value: name }, tier_name(name))));
  const node = h("select", { "aria-label": "Node" }, h("option", { value: "" }, "All nodes"));
  const key = h("input", { type: "search", "aria-label": "Key, or how it begins", placeholder: "Key, or how it begins…", autocomplete: "off", spellcheck: "false" });
  const rows = h("div", null, h("p", { class: "quiet" }, "Loading…"));
  const more = h("button", { type: "button", onclick: () => load(false) }, "Show more");
  more.hidden = true;
  let items = [];
  let cursor = null;
  let turn = 0;

  async function load(anew) {
    turn += 1;
    const mine = turn;
    if (anew) [items, cursor] = [[], null];
    more.disabled = true;
    try {
      const page = await get(path(["namespaces", digest, "blocks"], { tenant, node: node.value, tier: tier.value, limit: PAGE, cursor }));
      if (mine !== turn) return;
      items = [...items, ...page.items];
      cursor = page.next;
      more.hidden = cursor === null;
      draw(page.unreachable);
    } catch (problem) {
      morph(rows, message(told(problem), "bad"));
    } finally {
      more.disabled = false;
    }
  }
  function draw(unreachable) {
    const begin = key.value.trim().toLowerCase();
    const shown = items.filter((block) => block.key.startsWith(begin));
    morph(rows, unreachable_note(unreachable), blocks_table(shown, tenant, cursor !== null),
      begin && items.length ? h("p", { class: "quiet small" }, `${count(shown.length)} of the ${plural(items.length, "block")} loaded so far.`) : null);
  }
  tier.onchange = () => load(true);
  node.onchange = () => load(true);
  key.oninput = () => draw({});
  key.onkeydown = (event) => {
    const whole = key.value.trim().toLowerCase();
    if (event.key === "Enter" && KEY.test(whole)) location.hash = block_href(tenant, digest, whole);
  };
  fill_nodes(node);
  load(true);
  return h("section", { class: "card", "aria-label": "Blocks", "data-own": "", "data-key": "blocks" },
    h("div", { class: "head" }, h("h2", null, "Blocks"), h("div", { class: "right filters" }, key, node, tier,
      h("button", { type: "button", onclick: () => load(true) }, "Refresh"))),
    rows, h("div", null, more));
}

/** The nodes to choose from; the list is loaded for all of them in the meantime. */
async function fill_nodes(select) {
  const options = await node_options()().catch((problem) => { notify(told(problem), "bad"); return []; });
  select.append(...options.map(([value, text]) => h("option", { value }, text)));
}

const block_href = (tenant, digest, key) => `#/blocks/${encodeURIComponent(tenant)}/${digest}/${key}`;

function blocks_table(items, tenant, partial) {
  return table("Blocks", [
    { name: "Key", head: true, of: (block) => h("a", { href: block_href(tenant, block.namespace, block.key) }, short_key(block.key)) },
    { name: "Node", of: (block) => block.node },
    { name: "Tier", of: (block) => tier_name(block.tier) },
    { name: "Place in chain", num: true, of: (block) => count(block.depth) },
    { name: "Bytes", num: true, of: (block) => bytes(block.bytes) },
    { name: "Parts", num: true, of: (block) => count(block.parts) },
    { name: "Used", num: true, of: (block) => ago(block.age_s) },
    { name: "Pin", of: (block) => (block.pin !== "none" ? pill(block.pin, "accent") : DASH) },
    { name: "Replica", of: (block) => (block.copy ? "secondary" : "primary") },
  ], items, { none: partial ? "None among those searched so far: show more." : "No such blocks." });
}

export function block_view(root, tenant, namespace, key) {
  const space = { tenant, digest: namespace };
  const head = () => heading(h("code", null, key), { crumb: { href: namespace_href(space), text: "Namespace" },
    actions: [pin_button(space, [key]), warm_button(space, [key])] });
  const view = live(root, async (signal) => {
    const named = { keys: [key], namespace };
    const { nodes, unreachable } = await change("POST", path(["blocks"], { tenant }), named, signal);
    const [node] = Object.keys(nodes); // one that has the namespace open
    const located = node ? await change("POST", path(["operator", "locate"], { tenant, node }), named, signal) : [];
    return { here: Object.values(nodes).flat(), located, unreachable };
  }, (block) => {
    const replicas = block.located.flatMap((each) => each.replicas.map((one) => ({ ...one, of: each.parts })));
    return [
      head(),
      unreachable_note(block.unreachable),
      card("Replicas", h("p", { class: "quiet small" }, "As the directory has them, which is a hint."), table("Replicas", [
        { name: "Node", head: true, of: (each) => each.node },
        { name: "Tier", of: (each) => tier_name(each.tier) },
        { name: "Parts", num: true, of: (each) => `${count(each.parts)} of ${count(each.of)}` },
      ], replicas, { none: "No node is known to hold this block." })),
      card("What the nodes say", table("What the nodes say", [
        { name: "Node", head: true, of: (each) => each.node },
        { name: "Tier", of: (each) => tier_name(each.tier) },
        { name: "Bytes", num: true, of: (each) => bytes(each.bytes) },
        { name: "Place in chain", num: true, of: (each) => count(each.depth) },
        { name: "Used", num: true, of: (each) => ago(each.age_s) },
        { name: "Leases", num: true, of: (each) => count(each.leases) },
        { name: "Pin", of: (each) => each.pin },
        { name: "Before it", of: (each) => (each.parent ? short_key(each.parent) : DASH) },
      ], block.here, { none: "No node has it." })),
    ];
  }, { head });
  return view.stop;
}

// ---- pins --------------------------------------------------------------------------------------------

const pin_button = (space, keys = []) => (session.may("operator")
  ? h("button", { type: "button", onclick: () => pin_dialog(space, keys) }, "Pin…") : null);

/** space: {tenant, digest}. keys: named at first. */
function pin_dialog({ tenant, digest }, keys) {
  open_dialog("Pin blocks", (dialog) => {
    const named = keys_box(keys);
    const kind = h("select", null, Object.entries(PINS).map(([value, text]) => h("option", { value }, text)));
    const node = h("select", null, h("option", { value: "" }, "All nodes"));
    const answer = h("div", { role: "status", "aria-live": "polite" });
    const go = h("button", { type: "submit", class: "main" }, "Pin");
    const changed = () => {
      const { keys: found, lacks } = parse_keys(named.value);
      go.disabled = lacks !== null;
      go.textContent = `${kind.value === "none" ? "Unpin" : "Pin"} ${lacks ? "" : plural(found.length, "block")}`.trim();
      morph(answer, lacks && named.value ? message(lacks, "warn")
        : kind.value === "hard" ? message("What is pinned hard takes up memory until it is unpinned.", "warn") : null);
    };
    named.oninput = changed;
    kind.onchange = changed;
    fill(node, node_options(dialog.aborted));
    on_submit(dialog, {
      go, answer, changed,
      async act() {
        const body = { keys: parse_keys(named.value).keys, kind: kind.value, namespace: digest };
        const { nodes, unreachable } = await change("POST", path(["pins"], { tenant, node: node.value }), body, dialog.aborted);
        dialog.close();
        const silent = Object.entries(unreachable).map(([name, why]) => `; ${name} did not answer: ${why}`);
        notify(`${kind.value === "none" ? "Unpinned" : "Pinned"} on ${Object.entries(nodes).map(([name, blocks]) => `${name}: ${count(blocks)}`).join(", ") || "no node"}${silent.join("")}.`,
          silent.length ? "bad" : "");
      },
    });
    return [
      h("p", { class: "quiet" }, "In memory and on disks, where nodes have these blocks."),
      field("Keys", named, "With blanks between them."),
      h("div", { class: "both" }, field("Pin", kind), field("Nodes", node)),
      answer,
      h("div", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), go),
    ];
  });
}
