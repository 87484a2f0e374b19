// What the pool holds: namespaces and their blocks, eviction, jobs.

import { change, get, list, path, poll, session } from "./api.js";
import { field, h, morph, notify, open_dialog } from "./dom.js";
import { DASH, ago, bytes, count, duration, percent, plural, title_of } from "./format.js";
import { bar, card, heading, live, message, namespace_href, namespace_name, pairs, pill, short_key, state_pill, table,
  tier_name, told, unreachable_note } from "./parts.js";

const PAGE = 100;
const COUNT_POLL_MS = 400;
const TIERS = ["dram", "ssd", "device"];
const UNITS = { minutes: 60, hours: 3600, days: 86400 };

/** Blocks and bytes in memory of a namespace, of all nodes that tell. A block's parts lie together mostly: counted are
 *  those of the part that has most. */
function held({ nodes }) {
  const each = Object.values(nodes);
  const blocks = each.reduce((sum, on) => sum + Math.max(0, ...on.blocks), 0);
  return { blocks, nbytes: each.reduce((sum, on) => sum + on.held_bytes, 0) };
}

const evict_button = (scope) => (session.may("operator")
  ? [h("button", { type: "button", onclick: () => evict_dialog(scope) }, "Evict…")] : []);

export function namespaces_view(root) {
  const view = live(root, (signal) => get(path(["namespaces"], { limit: 1000 }), signal), ({ items: spaces, next: more, unreachable }) => [
    heading("Namespaces", { actions: evict_button(null) }),
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

const SETTING_NAMES = {
  replicas: "Replicas", write: "Written to SSD", ttl_s: "Kept unused for", ssd_codec: "Codec on SSD",
  dram_quota: "DRAM quota", ssd_quota: "SSD quota", write_remote: "Written to object storage",
};

function setting(name, value) {
  if (name === "ttl_s") return value ? duration(value) : "no limit";
  if (name.endsWith("_quota")) return !value ? "the tenant's" : value <= 1 && !Number.isInteger(value) ? percent(value) : bytes(value);
  if (name === "ssd_codec") return value || "none";
  return value === "" || value === null ? "as each node does" : String(value);
}

export function namespace_view(root, tenant, digest) {
  const blocks = block_list(tenant, digest);
  const crumb = { href: "#/namespaces", text: "Namespaces" };
  const view = live(root, (signal) => get(path(["namespaces", digest], { tenant }), signal), (space) => {
    const { blocks: number, nbytes } = held(space);
    return [
      heading(namespace_name(space), { crumb,
        after: [pill(`${plural(number, "block")} in memory`), pill(bytes(nbytes))],
        actions: evict_button(space) }),
      h("div", { class: "halves" },
        card("Settings", pairs(Object.entries(space.settings)
          .map(([name, value]) => [SETTING_NAMES[name] ?? title_of(name), setting(name, value)]))),
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
      const page = await get(path(["namespaces", digest, "blocks"], { tenant, tier: tier.value, limit: PAGE, cursor }));
      if (mine !== turn) return;
      items = [...items, ...page.items];
      cursor = page.next;
      more.hidden = cursor === null;
      morph(rows, unreachable_note(page.unreachable), blocks_table(items, tenant, cursor !== null));
    } catch (problem) {
      morph(rows, message(told(problem), "bad"));
    } finally {
      more.disabled = false;
    }
  }
  tier.onchange = () => load(true);
  load(true);
  return h("section", { class: "card", "aria-label": "Blocks", "data-own": "", "data-key": "blocks" },
    h("div", { class: "head" }, h("h2", null, "Blocks"), h("div", { class: "right" }, tier,
      h("button", { type: "button", onclick: () => load(true) }, "Refresh"))),
    rows, h("div", null, more));
}

function blocks_table(items, tenant, partial) {
  return table("Blocks", [
    { name: "Key", head: true, of: (block) => h("a", { href: `#/blocks/${encodeURIComponent(tenant)}/${block.namespace}/${block.key}` }, short_key(block.key)) },
    { name: "Node", of: (block) => block.node },
    { name: "Tier", of: (block) => tier_name(block.tier) },
    { name: "Place in chain", num: true, of: (block) => count(block.depth) },
    { name: "Bytes", num: true, of: (block) => bytes(block.bytes) },
    { name: "Parts", num: true, of: (block) => count(block.parts) },
    { name: "Used", num: true, of: (block) => ago(block.age_s) },
    { name: "Pin", of: (block) => (block.pin !== "none" ? pill(block.pin, "accent") : DASH) },
    { name: "Kind", of: (block) => (block.copy ? "copy" : "own") },
  ], items, { none: partial ? "None on the nodes searched so far: show more." : "No blocks in this tier." });
}

export function block_view(root, tenant, namespace, key) {
  const head = () => heading(h("code", null, key), { crumb: { href: namespace_href({ tenant, digest: namespace }), text: "Namespace" } });
  const view = live(root, (signal) => get(path(["blocks", key], { tenant, namespace }), signal), (block) => {
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

// ---- eviction ----------------------------------------------------------------------------------------

/** Scope, then counting (a dry run), then the eviction of what was counted. A change of the scope asks for a new count. */
function evict_dialog(scope) {
  open_dialog("Evict blocks", (dialog) => {
    const space = h("select", null);
    const node = h("select", null, h("option", { value: "" }, "All nodes"));
    const tiers = TIERS.map((name) => h("input", { type: "checkbox", value: name, checked: true }));
    const unused = h("input", { type: "number", min: "0", step: "any", value: "", placeholder: "any", inputmode: "decimal" });
    const unit = h("select", null, Object.keys(UNITS).map((name) => h("option", { value: name }, name)));
    const answer = h("div", { role: "status", "aria-live": "polite" });
    const count_button = h("button", { type: "button", class: "main" }, "Count first");
    const go = h("button", { type: "button", class: "danger", disabled: true }, "Evict");
    let counted = null;

    const whole = (each) => `${each.tenant}/${each.digest}`;
    const offer = (each) => [whole(each), `${namespace_name(each)} (${each.tenant}, ${each.digest.slice(0, 6)}…)`];
    if (scope) add(space, [offer(scope)]);
    fill(space, async () => {
      const spaces = await list(["namespaces"], {}, { signal: dialog.aborted });
      const tenants = [...new Set(spaces.map((each) => each.tenant))];
      return [...spaces.map(offer), ...tenants.map((name) => [`${name}/`, `All of tenant ${name}`])];
    });
    fill(node, async () => (await list(["nodes"], {}, { signal: dialog.aborted })).map((each) => [each.node, each.node]));

    const spec = () => {
      const chosen = tiers.filter((each) => each.checked).map((each) => each.value);
      const found = { kind: "evict" };
      const [tenant, digest] = space.value.split("/");
      if (digest) found.namespace = digest;
      if (chosen.length < TIERS.length) found.tiers = chosen;
      if (Number(unused.value) > 0) found.unused_s = Number(unused.value) * UNITS[unit.value];
      return { tenant, body: { spec: found, nodes: node.value ? [node.value] : [] } };
    };
    const changed = () => {
      counted = null;
      go.disabled = true;
      go.textContent = "Evict";
      const none = !tiers.some((each) => each.checked);
      count_button.disabled = none || !space.value;
      morph(answer, none ? message("Choose at least one tier.", "warn") : null);
    };
    const controls = [space, node, unused, unit, ...tiers];
    for (const each of controls) each.onchange = changed;
    unused.oninput = changed;

    const all = [...controls, count_button];
    count_button.onclick = async () => {
      for (const each of all) each.disabled = true;
      morph(answer, message("Counting…"));
      const wanted = spec();
      try {
        const view = await run(wanted, dialog.aborted);
        counted = wanted;
        morph(answer, counts(view));
        go.disabled = !view.blocks || view.state !== "done";
        go.textContent = view.blocks ? `Evict ${plural(view.blocks, "block")}` : "Evict";
        if (!go.disabled) queueMicrotask(() => go.focus());
      } catch (problem) {
        if (dialog.aborted.aborted) return;
        morph(answer, message(told(problem), "bad"));
      } finally {
        for (const each of all) each.disabled = false;
      }
    };
    go.onclick = async () => {
      go.disabled = true;
      try {
        const job = await begin(counted, false, dialog.aborted);
        dialog.close();
        notify("The eviction has begun.");
        location.hash = `#/jobs/${encodeURIComponent(job)}`;
      } catch (problem) {
        if (dialog.aborted.aborted) return;
        morph(answer, message(told(problem), "bad"));
        go.disabled = false;
      }
    };
    queueMicrotask(() => {
      dialog.querySelector("form").onsubmit = (event) => {
        event.preventDefault();
        if (!count_button.disabled) count_button.click();
      };
    });
    return [
      h("p", { class: "quiet" }, "Nothing is lost that cannot be computed again. Pinned blocks stay."),
      field("Namespace", space),
      field("Nodes", node),
      h("fieldset", { class: "choices" }, h("legend", null, "Tiers"),
        tiers.map((each) => h("label", null, each, tier_name(each.value)))),
      h("div", { class: "both" }, field("Only what was not used for", unused), field("Unit of time", unit)),
      answer,
      h("div", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), count_button, go),
    ];
  });
}

function add(select, options) {
  for (const [value, text] of options) {
    if (![...select.options].some((known) => known.value === value)) select.append(h("option", { value }, text));
  }
}

async function fill(select, options) {
  try {
    add(select, await options());
    select.dispatchEvent(new Event("change"));
  } catch (problem) {
    if (problem.name !== "AbortError") notify(told(problem), "bad");
  }
}

/** Have a job begun; its name. */
async function begin({ tenant, body }, dry_run, signal) {
  return (await change("POST", path(["jobs"], { tenant }), { ...body, dry_run }, signal)).job;
}

/** Have a job counted and wait for the end of that. */
async function run(wanted, signal) {
  const job = await begin(wanted, true, signal);
  return new Promise((done, fail) => {
    const stop = poll(async () => {
      const view = await get(path(["jobs", job]), signal);
      if (view.state === "running") return;
      stop();
      done(view);
    }, (problem) => { stop(); fail(problem); }, COUNT_POLL_MS);
    signal.addEventListener("abort", () => { stop(); fail(new DOMException("closed", "AbortError")); });
  });
}

function counts(view) {
  const { nodes } = view;
  const failed = nodes.filter((each) => each.error);
  return h("div", { class: "field" },
    message(view.blocks ? `Would evict ${plural(view.blocks, "block")}, ${bytes(view.nbytes)}.${view.kept ? ` ${plural(view.kept, "pinned block")} would stay.` : ""}`
      : "Nothing matches: there is nothing to evict.", view.blocks ? "warn" : ""),
    unreachable_note(view.unreachable),
    failed.map((each) => message(`${each.node}: ${each.error}`, "bad")),
    nodes.length > 1 ? table("Counted", [
      { name: "Node", head: true, of: (each) => each.node },
      { name: "Blocks", num: true, of: (each) => count(each.blocks) },
      { name: "Bytes", num: true, of: (each) => bytes(each.nbytes) },
      { name: "Pinned", num: true, of: (each) => count(each.kept) },
    ], nodes) : null);
}

// ---- jobs --------------------------------------------------------------------------------------------

export function jobs_view(root, chosen) {
  const view = live(root, (signal) => get(path(["jobs"], { limit: 1000 }), signal), ({ items, unreachable }) => [
    heading("Jobs", { actions: evict_button(null) }),
    unreachable_note(unreachable),
    h("section", { class: "card", "aria-label": "Jobs" }, table("Jobs", [
      { name: "Job", head: true, of: (job) => [h("code", null, job.job), job.dry_run ? [" ", pill("count only")] : null] },
      { name: "Kind", of: (job) => title_of(job.kind) },
      { name: "State", of: (job) => [state_pill(job.state), job.nodes.filter((each) => each.error).map((each) => h("p", { class: "small name" }, `${each.node}: ${each.error}`))] },
      { name: "Progress", of: (job) => progress(job) },
      { name: "Blocks", num: true, of: (job) => count(job.blocks) },
      { name: "Bytes", num: true, of: (job) => bytes(job.nbytes) },
      { name: "Nodes", class: "name", of: (job) => job.nodes.map((each) => each.node).join(", ") || DASH },
      { name: "Tenant", of: (job) => job.tenant },
      { name: "By", of: (job) => job.by || DASH },
      { name: "Began", num: true, of: (job) => ago(age_s(job)) },
      { name: "", of: (job) => (job.state === "running" && session.may("operator")
        ? h("button", { type: "button", class: "small", "aria-label": `Stop ${job.job}`, onclick: () => stop_job(job.job, () => view.now()) }, "Stop") : null) },
    ], items.sort((one, other) => age_s(one) - age_s(other)), { none: "No jobs since the nodes started.", key: (job) => job.job,
      row: (job) => (job.job === chosen ? "chosen" : "") })),
  ], { head: () => heading("Jobs"), every_ms: 2000 });
  return view.stop;
}

/** Since the first of its nodes began it; without any: long ago. */
const age_s = (job) => (job.nodes.length ? Math.max(...job.nodes.map((each) => each.age_s)) : Infinity);

function progress(job) {
  const share = job.state === "done" ? 1 : job.total ? job.seen / job.total : 0;
  // Each kind counts something else: places in memory, blocks, bytes. What they have in common is their share.
  const text = job.total || job.state === "done" ? percent(share) : DASH;
  return h("span", { class: "nowrap" }, bar(share, "Progress", "inline"), " ", h("span", { class: "quiet small" }, text));
}

async function stop_job(job, again) {
  try {
    await change("DELETE", path(["jobs", job]));
    notify(`${job} is being stopped.`);
    again();
  } catch (problem) {
    notify(told(problem), "bad");
  }
}
