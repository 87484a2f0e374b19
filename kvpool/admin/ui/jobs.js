// Operators' long-running work: evict, warm and move blocks, each counted before it is begun; and the jobs that do it.

import { change, get, list, path, poll, session } from "./api.js";
import { field, h, morph, notify, open_dialog } from "./dom.js";
import { DASH, ago, bytes, count, duration, percent, plural } from "./format.js";
import { bar, heading, live, message, namespace_name, pill, state_pill, table, tier_name, told, unreachable_note } from "./parts.js";

const COUNT_POLL_MS = 400;
export const TIERS = ["dram", "ssd", "device"];
const UNITS = { minutes: 60, hours: 3600, days: 86400 };
const KEY = /^[0-9a-f]{32}$/;
export const KEYS_MAX = 1024; // that one request may name

// ---- a job is counted, then begun ----------------------------------------------------------------------

/** A dialog for a job. build(dialog) gives {intro, fields, controls, spec(), lacks()}: what is shown, what counts anew
 *  when it changes, the body of the request with its tenant, and what is still missing (a text, or nothing).
 *  verbs(): what is done, as {will: "Evict", would: "Would evict", none: "there is nothing to evict"}. */
function counted_dialog(title, verbs, build) {
  open_dialog(title, (dialog) => {
    const answer = h("div", { role: "status", "aria-live": "polite" });
    const count_button = h("button", { type: "button", class: "main" }, "Count first");
    const go = h("button", { type: "button", class: "danger", disabled: true }, verbs().will);
    let counted = null;
    const changed = () => {
      counted = null;
      go.disabled = true;
      go.textContent = verbs().will;
      const lacks = asked.lacks();
      count_button.disabled = lacks !== null;
      morph(answer, lacks ? message(lacks, "warn") : null);
    };
    const asked = build(dialog, changed);
    for (const each of asked.controls) {
      each.onchange = changed;
      if (each.nodeName !== "SELECT") each.oninput = changed;
    }
    const all = [...asked.controls, count_button];
    count_button.onclick = async () => {
      const off = all.map((each) => each.disabled);
      for (const each of all) each.disabled = true;
      morph(answer, message("Counting…"));
      const wanted = asked.spec();
      try {
        const view = await run(wanted, dialog.aborted);
        counted = wanted;
        morph(answer, counts(view, verbs()));
        go.disabled = !view.blocks || view.state !== "done";
        go.textContent = view.blocks ? `${verbs().will} ${plural(view.blocks, "block")}` : verbs().will;
      } catch (problem) {
        if (dialog.aborted.aborted) return;
        morph(answer, message(told(problem), "bad"));
      } finally {
        all.forEach((each, n) => { each.disabled = off[n]; });
      }
      if (!go.disabled) queueMicrotask(() => go.focus());
    };
    go.onclick = async () => {
      go.disabled = true;
      try {
        const job = await begin(counted, false, dialog.aborted);
        dialog.close();
        notify(`Job ${job} runs.`);
        location.hash = `#/jobs/${encodeURIComponent(job)}`;
      } catch (problem) {
        if (dialog.aborted.aborted) return;
        morph(answer, message(told(problem), "bad"));
        go.disabled = false;
      }
    };
    queueMicrotask(() => {
      changed();
      dialog.querySelector("form").onsubmit = (event) => {
        event.preventDefault();
        if (!count_button.disabled) count_button.click();
      };
    });
    return [
      h("p", { class: "quiet" }, asked.intro), asked.fields, answer,
      h("div", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), count_button, go),
    ];
  });
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

function counts(view, { would, none }) {
  const { nodes } = view;
  const failed = nodes.filter((each) => each.error);
  return h("div", { class: "field" },
    message(view.blocks ? `${would} ${plural(view.blocks, "block")}, ${bytes(view.nbytes)}.${view.kept ? ` ${plural(view.kept, "pinned block")} would stay.` : ""}`
      : `Nothing matches: ${none}.`, view.blocks ? "warn" : ""),
    unreachable_note(view.unreachable),
    failed.map((each) => message(`${each.node}: ${each.error}`, "bad")),
    nodes.length > 1 ? table("Counted", [
      { name: "Node", head: true, of: (each) => each.node },
      { name: "Blocks", num: true, of: (each) => count(each.blocks) },
      { name: "Bytes", num: true, of: (each) => bytes(each.nbytes) },
      { name: "Pinned", num: true, of: (each) => count(each.kept) },
    ], nodes) : null);
}

export function add(select, options) {
  for (const [value, text] of options) {
    if (![...select.options].some((known) => known.value === value)) select.append(h("option", { value }, text));
  }
}

export async function fill(select, options) {
  try {
    add(select, await options());
    select.dispatchEvent(new Event("change"));
  } catch (problem) {
    if (problem.name !== "AbortError") notify(told(problem), "bad");
  }
}

export const node_options = (signal) => async () => (await list(["nodes"], {}, { signal })).map((each) => [each.node, each.node]);

/** The keys in a text, with blanks or commas between them; and why they will not do, or nothing. */
export function parse_keys(text) {
  const keys = [...new Set(text.toLowerCase().split(/[\s,]+/).filter(Boolean))];
  const bad = keys.find((key) => !KEY.test(key));
  const lacks = !keys.length ? "Name at least one block." : bad ? `${bad.slice(0, 40)} is no block's key: 32 hex digits each.`
    : keys.length > KEYS_MAX ? `At most ${count(KEYS_MAX)} blocks at a time.` : null;
  return { keys, lacks };
}

export const keys_box = (keys) => h("textarea", { rows: String(Math.min(6, Math.max(2, keys.length))), class: "mono", spellcheck: "false", autocomplete: "off" }, keys.join("\n"));

// ---- evict ---------------------------------------------------------------------------------------------

export const evict_button = (scope) => (session.may("operator")
  ? h("button", { type: "button", onclick: () => evict_dialog(scope) }, "Evict…") : null);

/** scope: the namespace that is offered first, or null. */
function evict_dialog(scope) {
  const verbs = { will: "Evict", would: "Would evict", none: "there is nothing to evict" };
  counted_dialog("Evict blocks", () => verbs, (dialog) => {
    const space = h("select", null);
    const node = h("select", null, h("option", { value: "" }, "All nodes"));
    const tiers = TIERS.map((name) => h("input", { type: "checkbox", value: name, checked: true }));
    const unused = h("input", { type: "number", min: "0", step: "any", value: "", placeholder: "any", inputmode: "decimal" });
    const unit = h("select", null, Object.keys(UNITS).map((name) => h("option", { value: name }, name)));
    const whole = (each) => `${each.tenant}/${each.digest}`;
    const offer = (each) => [whole(each), `${namespace_name(each)} (${each.tenant}, ${each.digest.slice(0, 6)}…)`];
    if (scope) add(space, [offer(scope)]);
    fill(space, async () => {
      const spaces = await list(["namespaces"], {}, { signal: dialog.aborted });
      const tenants = [...new Set(spaces.map((each) => each.tenant))];
      return [...spaces.map(offer), ...tenants.map((name) => [`${name}/`, `All of tenant ${name}`])];
    });
    fill(node, node_options(dialog.aborted));
    return {
      intro: "Nothing is lost that cannot be computed again. Pinned blocks stay.",
      controls: [space, node, unused, unit, ...tiers],
      lacks: () => (!tiers.some((each) => each.checked) ? "Choose at least one tier." : space.value ? null : ""),
      spec() {
        const chosen = tiers.filter((each) => each.checked).map((each) => each.value);
        const found = { kind: "evict" };
        const [tenant, digest] = space.value.split("/");
        if (digest) found.namespace = digest;
        if (chosen.length < TIERS.length) found.tiers = chosen;
        if (Number(unused.value) > 0) found.unused_s = Number(unused.value) * UNITS[unit.value];
        if (!found.namespace && !found.unused_s) found.everything = true;
        return { tenant, body: { spec: found, nodes: node.value ? [node.value] : [] } };
      },
      fields: [
        field("Namespace", space),
        field("Nodes", node),
        h("fieldset", { class: "choices" }, h("legend", null, "Tiers"),
          tiers.map((each) => h("label", null, each, tier_name(each.value)))),
        h("div", { class: "both" }, field("Only what was not used for", unused), field("Unit of time", unit)),
      ],
    };
  });
}

// ---- warm and move -------------------------------------------------------------------------------------

export const warm_button = (space, keys = []) => (session.may("operator")
  ? h("button", { type: "button", onclick: () => warm_dialog(space, keys) }, "Warm…") : null);

/** space: {tenant, digest}. keys: named at first. */
function warm_dialog({ tenant, digest }, keys) {
  const move = h("input", { type: "checkbox" });
  const verbs = () => (move.checked ? { will: "Move", would: "Would move", none: "there is nothing to move" }
    : { will: "Warm", would: "Would bring", none: "there is nothing to bring, or all of it is in memory" });
  counted_dialog("Warm memory", verbs, (dialog) => {
    const to = h("select", null);
    const from = h("select", null, h("option", { value: "" }, "the blocks named below"));
    const named = keys_box(keys);
    fill(to, node_options(dialog.aborted));
    fill(from, async () => (await node_options(dialog.aborted)()).map(([name]) => [name, `all that ${name} has`]));
    return {
      intro: "Brings blocks of this namespace into a node's memory before engines ask for them: from its disks, other nodes and object storage.",
      controls: [to, from, named, move],
      lacks() {
        named.disabled = from.value !== "";
        move.disabled = from.value === "";
        if (move.disabled) move.checked = false;
        if (!to.value) return "";
        if (from.value) return from.value === to.value ? "Choose two nodes that differ." : null;
        return parse_keys(named.value).lacks;
      },
      spec() {
        const what = from.value ? { source: from.value, move: move.checked } : { keys: parse_keys(named.value).keys };
        return { tenant, body: { spec: { kind: "warm", namespace: digest, ...what }, nodes: [to.value] } };
      },
      fields: [
        field("Into the memory of", to),
        field("What", from),
        field("Keys", named, "In the order of the prompt, with blanks between them."),
        h("div", { class: "choices" }, h("label", null, move, "Move: the other node drops what has arrived")),
      ],
    };
  });
}

// ---- jobs --------------------------------------------------------------------------------------------

export function jobs_view(root, chosen) {
  const view = live(root, (signal) => get(path(["jobs"], { limit: 1000 }), signal), ({ items, unreachable }) => [
    heading("Jobs", { actions: [evict_button(null)] }),
    unreachable_note(unreachable),
    h("section", { class: "card", "aria-label": "Jobs" }, table("Jobs", [
      { name: "Job", head: true, of: (job) => h("code", null, job.job) },
      { name: "State", of: (job) => [state_pill(job.state), job.dry_run ? [" ", pill("dry run")] : null, job.nodes.filter((each) => each.error).map((each) => h("p", { class: "small name" }, `${each.node}: ${each.error}`))] },
      { name: "Seen", of: (job) => progress(job) },
      { name: "Blocks", num: true, of: (job) => count(job.blocks) },
      { name: "Bytes", num: true, of: (job) => bytes(job.nbytes) },
      { name: "Nodes", class: "name", of: (job) => job.nodes.map((each) => each.node).join(", ") || DASH },
      { name: "Tenant", of: (job) => job.tenant },
      { name: "By", of: (job) => job.by || DASH },
      { name: "Began", num: true, of: (job) => ago(age_s(job)) },
      { name: "Took", num: true, of: (job) => duration(Math.max(0, ...job.nodes.map((each) => each.took_s))) },
      ...(session.may("operator") && items.some((job) => job.state === "running") ? [{ name: "", of: (job) => (job.state === "running"
        ? h("button", { type: "button", class: "small", "aria-label": `Stop ${job.job}`, onclick: () => stop_job(job.job, () => view.now()) }, "Stop") : DASH) }] : []),
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
  return h("span", { class: "nowrap" }, bar(share, "Seen", "inline"), " ", h("span", { class: "quiet small" }, text));
}

async function stop_job(job, again) {
  try {
    await change("DELETE", path(["jobs", job]));
    notify(`Job ${job} is being stopped.`);
    again();
  } catch (problem) {
    notify(told(problem), "bad");
  }
}
