// What happened: one request explained, events as they come, who changed what.

import { get, path, session, stream } from "./api.js";
import { field, h, morph, notify } from "./dom.js";
import { DASH, by_name, count, date_of, duration, milliseconds, title_of, zone } from "./format.js";
import { node_options } from "./jobs.js";
import { empty, heading, live, message, pairs, pill, table, told, unreachable_note } from "./parts.js";

const EVENTS_MAX = 500;
const REPLAYED = 200;

// ---- requests ----------------------------------------------------------------------------------------

const NO_ROUTER = ["No router is configured for this gateway, so no request can be explained: start the daemon with ",
  h("code", null, "--router http://HOST:8080"), " (", h("code", null, "routers"), " in its file), one for each router."];

export function requests_view(root, ident) {
  if (!session.cluster.routers) {
    root.replaceChildren(heading("Requests"), message(NO_ROUTER, "warn"));
    return () => {};
  }
  const wanted = h("input", { type: "search", value: ident ?? "", autocomplete: "off", spellcheck: "false" });
  const found = h("div", null);
  const gone = new AbortController();
  found.style.display = "contents";
  const form = h("form", { class: "inline-form", onsubmit: (event) => {
    event.preventDefault();
    const text = wanted.value.trim();
    const hash = text ? `#/requests/${encodeURIComponent(text)}` : "#/requests";
    if (location.hash === hash && text) load();
    else location.hash = hash;
  } }, field("Request id", wanted, "An answer of the router says it in x-kvpool-request-id; clients may choose it with x-request-id."),
  h("button", { type: "submit", class: "main" }, "Explain"));
  root.replaceChildren(heading("Requests"), h("section", { class: "card", "aria-label": "Find a request" }, form), found);

  async function load() {
    morph(found, h("p", { class: "quiet" }, "Loading…"));
    try {
      const { router, account } = await get(path(["requests", ident]), gone.signal);
      morph(found, explained(account, router));
    } catch (problem) {
      if (gone.signal.aborted) return;
      morph(found, message(told(problem), "bad"));
    }
  }
  if (ident) load();
  else morph(found, empty("Give a request's id to see which engines were compared, at what cost, and what came of it."));
  return () => gone.abort();
}

const OWN = new Set(["request", "model", "tenant", "outcome", "steps"]);

function explained(account, router) {
  const facts = Object.entries(account).filter(([name]) => !OWN.has(name));
  return [
    h("section", { class: "card", "aria-label": "Outcome" },
      h("div", { class: "head" }, h("h2", null, h("code", null, account.request ?? "")), outcome_pill(account.outcome)),
      pairs([["Model", account.model || DASH], ["Tenant", account.tenant || DASH], ["Router", router],
        ...facts.map(([name, value]) => [title_of(name), by_name(name, value)])])),
    h("section", { class: "card", "aria-label": "Timeline" }, h("h2", null, "Timeline"),
      account.steps?.length ? h("ol", { class: "timeline" }, account.steps.map(step_item)) : empty("Nothing was noted.")),
  ];
}

function outcome_pill(outcome) {
  const text = String(outcome ?? "unknown");
  const kind = /in flight/.test(text) ? "accent" : /^(done|ok|answered|served|2\d\d|success|completed)/i.test(text) ? "good" : "warn";
  return h("span", { class: `pill ${kind}` }, text);
}

const STEP_OWN = new Set(["at_s", "what", "candidates", "decode_candidates", "expected"]);

function step_item(step) {
  const details = Object.entries(step).filter(([name, value]) => !STEP_OWN.has(name) && value !== null && value !== "");
  const chosen = step.engine;
  return h("li", null,
    h("div", null, h("span", { class: "at" }, `+${milliseconds(step.at_s)}`), h("b", null, title_of(String(step.what)))),
    details.length ? h("p", { class: "facts" }, details.map(([name, value]) =>
      h("span", null, `${title_of(name)}: ${by_name(name, value)}`))) : null,
    step.candidates?.length ? candidates("Engines compared for the prompt", step.candidates, chosen) : null,
    step.decode_candidates?.length ? decoders(step.decode_candidates, step.decode ?? chosen) : null);
}

const engine_cell = (chosen) => (each) => [each.engine, each.engine === chosen ? [" ", pill("chosen", "accent")] : null];

function candidates(caption, items, chosen) {
  return table(caption, [
    { name: "Engine", head: true, of: engine_cell(chosen) },
    { name: "Cost", num: true, of: (each) => by_name("cost", each.cost) },
    { name: "First token", num: true, of: (each) => duration(each.ttft_s) },
    { name: "Starts in", num: true, of: (each) => duration(each.starts_s) },
    { name: "Prefill", num: true, of: (each) => duration(each.prefill_s) },
    { name: "Load", num: true, of: (each) => duration(each.load_s) },
    { name: "Cached", num: true, of: (each) => count(each.cached_blocks) },
    { name: "Loaded", num: true, of: (each) => count(each.loaded_blocks) },
    { name: "Pulled", num: true, of: (each) => count(each.pulled_blocks) },
    { name: "From", of: (each) => each.source || DASH },
    { name: "Link", of: (each) => each.link?.known || DASH },
  ], items, { row: (each) => (each.engine === chosen ? "chosen" : "") });
}

function decoders(items, chosen) {
  return table("Engines compared for the answer", [
    { name: "Engine for the answer", head: true, of: engine_cell(chosen) },
    { name: "Cost", num: true, of: (each) => by_name("cost", each.cost) },
    { name: "Per token", num: true, of: (each) => milliseconds(each.tpot_s ?? NaN) },
    { name: "Lacks blocks", num: true, of: (each) => count(each.lacks_blocks) },
    { name: "Handover", num: true, of: (each) => duration(each.handover_s) },
    { name: "Link", of: (each) => each.link?.known || DASH },
    { name: "Fits", of: (each) => (each.fits ? "yes" : "no") },
  ], items, { row: (each) => (each.engine === chosen ? "chosen" : "") });
}

// ---- events ------------------------------------------------------------------------------------------

export function events_view(root) {
  const gone = new AbortController();
  const events = [];
  const status = h("span", null, pill("connecting…"));
  const trouble = h("div", null);
  trouble.style.display = "contents";
  const filter = h("input", { type: "search", "aria-label": "Show only events with", placeholder: "Key, job, token…", autocomplete: "off", spellcheck: "false" });
  const node = h("select", { "aria-label": "Node", onchange: () => listen() }, h("option", { value: "" }, "All nodes"));
  const kinds = h("select", { "aria-label": "Kind", onchange: () => draw() }, h("option", { value: "" }, "All kinds"));
  const log = h("ol", { class: "log" });
  const none = empty("No events yet.");
  let drawing = 0;
  let gaps = 0;
  const draw = () => {
    drawing = 0;
    const wanted = filter.value.trim().toLowerCase();
    const shown = events.filter((event) => (!wanted || event.text.includes(wanted)) && (!kinds.value || event.kind === kinds.value));
    morph(log, shown.map((event) => event_row(event)));
    none.hidden = shown.length > 0;
    none.textContent = events.length ? "No such event among those kept here." : "No events yet.";
  };
  const soon = () => {
    if (drawing === 0) drawing = requestAnimationFrame(draw);
  };
  filter.oninput = draw;
  root.replaceChildren(
    heading("Events", { after: [status] }), trouble,
    h("p", { class: "quiet" }, `What has happened, as it comes; the last ${EVENTS_MAX} are kept here. Times are ${zone()}, by the clock of the node that tells.`),
    h("div", { class: "filters" }, filter, node, kinds),
    h("section", { class: "card", role: "log", "aria-label": "Events, newest first", "aria-live": "off" }, log, none));
  node_options(gone.signal)().then((options) => node.append(...options.map(([value, text]) => h("option", { value }, text))),
    (problem) => gone.signal.aborted || notify(told(problem), "bad"));
  let heard_until = new AbortController(); // of the stream for the chosen node

  function listen() {
    heard_until.abort();
    heard_until = new AbortController();
    events.length = 0;
    soon();
    hear(AbortSignal.any([gone.signal, heard_until.signal]));
  }

  const hear = (signal) => stream(path(["events"], { replay: REPLAYED, nodes: node.value }), {
    signal,
    heard({ kind, data }) {
      let event;
      try {
        event = JSON.parse(data);
      } catch {
        return; // no event of ours: a comment of a proxy
      }
      if (kind === "gap") {
        gaps += 1;
        event = { number: gaps, at_s: Date.now() / 1000, node: "gateway", kind, details: event };
      }
      if (![...kinds.options].some((known) => known.value === event.kind)) kinds.append(h("option", { value: event.kind }, title_of(event.kind)));
      event.text = `${event.node} ${event.kind} ${JSON.stringify(event.details)}`.toLowerCase();
      const at = events.findIndex((each) => each.at_s <= event.at_s);
      events.splice(at < 0 ? events.length : at, 0, event);
      if (events.length > EVENTS_MAX) events.pop();
      soon();
    },
    state(now, problem) {
      morph(status, now === "live" ? h("span", { class: "pill good" }, "live") : h("span", { class: "pill warn" }, "reconnecting…"));
      morph(trouble, problem && problem.status !== 0 ? message(told(problem), "bad") : null);
    },
  });
  listen();
  return () => gone.abort();
}

function event_row(event) {
  return h("li", { "data-key": `${event.node}:${event.number}:${event.at_s}` },
    h("time", { datetime: new Date(event.at_s * 1000).toISOString(), class: "nowrap" }, date_of(event.at_s)),
    h("span", null, event.node), h("span", { class: "kind" }, title_of(String(event.kind))),
    h("span", null, details_of(event.details)));
}

const DETAIL_NAMES = { of: "Node" }; // the one it is about; the event's own node is who tells it

function details_of(details) {
  return Object.entries(details ?? {}).filter(([, value]) => value !== "" && value !== null)
    .map(([name, value]) => `${DETAIL_NAMES[name] ?? title_of(name)}: ${by_name(name, value)}`).join(" · ") || DASH;
}

// ---- audit -------------------------------------------------------------------------------------------

export function audit_view(root) {
  const view = live(root, (signal) => get(path(["audit"], { limit: 500 }), signal), ({ items, unreachable }) => [
    heading("Audit"), unreachable_note(unreachable),
    h("p", { class: "quiet" }, `Who has changed what, and failed logins, newest first. Times are ${zone()}. Nodes remember their last few thousand events; all are in their logs.`),
    h("section", { class: "card", "aria-label": "Changes" }, table("Changes", [
      { name: "When", of: (event) => h("span", { class: "nowrap" }, date_of(event.at_s)) },
      { name: "By", of: (event) => event.details?.by ?? event.details?.source ?? DASH },
      { name: "What", head: true, of: (event) => title_of(String(event.details?.what ?? event.kind)) },
      { name: "Details", class: "name", of: (event) => {
        const { by, what, source, ...rest } = event.details ?? {};
        return details_of(rest);
      } },
      { name: "Node", of: (event) => event.node },
    ], items, { none: "Nobody has changed anything.", key: (event) => `${event.node}:${event.number}:${event.at_s}` })),
  ], { head: () => heading("Audit") });
  return view.stop;
}
