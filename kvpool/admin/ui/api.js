// The gateway: requests with the token, errors as they were told, streams, polling at a sane rate.

const TOKEN = "kvpool-token";
const REQUEST_MS = 20_000;
const BACKOFF_MS = [1000, 2000, 4000, 8000];
const STREAM_BUFFER_MAX = 1 << 20;
export const POLL_MS = 5000;

/** What the gateway answers in place of what was asked for. status 0: it did not answer. */
export class Problem extends Error {
  constructor(status, title, detail = "", code = "") {
    super(detail || title);
    this.status = status;
    this.title = title;
    this.code = code;
  }
}

export const session = {
  me: null,
  cluster: null,
  get token() {
    return sessionStorage.getItem(TOKEN) ?? "";
  },
  set token(value) {
    if (value) sessionStorage.setItem(TOKEN, value);
    else sessionStorage.removeItem(TOKEN);
  },
  /** Whether the token sees what is of no one tenant: tiers, history, drains. */
  get whole() {
    return this.me?.tenants.includes("*") ?? false;
  },
  may(role) {
    const order = ["viewer", "operator", "admin"];
    return order.indexOf(this.me?.role) >= order.indexOf(role);
  },
};

/** Told of each change: "live", "lost" (nobody answers) or "refused" (the token is not taken). */
export const line = new EventTarget();
let standing = "live";
function stand(now) {
  if (now === standing) return;
  standing = now;
  line.dispatchEvent(new CustomEvent("change", { detail: now }));
}

/** A path of the interface with its parameters; those without a value are left out. */
export function path(parts, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== "" && value !== null && value !== undefined) query.set(name, value);
  }
  const asked = query.toString();
  return `/v1/${parts.map(encodeURIComponent).join("/")}${asked ? `?${asked}` : ""}`;
}

async function send(method, url, { body, signal, headers = {}, timeout_ms = REQUEST_MS } = {}) {
  const all = { ...headers };
  if (session.token) all.Authorization = `Bearer ${session.token}`;
  if (body !== undefined) all["Content-Type"] = "application/json";
  if (method !== "GET") all["Idempotency-Key"] ??= unique();
  const signals = [signal, timeout_ms ? AbortSignal.timeout(timeout_ms) : null].filter(Boolean);
  let answer;
  try {
    answer = await fetch(url, {
      method,
      headers: all,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.any(signals),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    stand("lost");
    throw new Problem(0, "No answer", "The gateway does not answer.", error.name);
  }
  if (answer.ok) {
    stand("live");
    return answer;
  }
  const problem = await problem_of(answer);
  if (answer.status === 401) stand("refused");
  else if (answer.status === 502 || answer.status === 504) stand("lost");
  else stand("live");
  throw problem;
}

async function problem_of(answer) {
  let told = {};
  try {
    told = await answer.json();
  } catch {
    // Not ours: a proxy's own page, perhaps. The status says enough.
  }
  const title = String(told.title ?? `HTTP ${answer.status}`);
  return new Problem(answer.status, title, String(told.detail ?? ""), String(told.code ?? ""));
}

// crypto.randomUUID is only there on secure origins, and a gateway in a private network may have no TLS.
function unique() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function ask(method, url, options) {
  const answer = await send(method, url, options);
  const text = await answer.text();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch {
    throw new Problem(answer.status, "Not understood", "What answers here is no kvpool gateway.");
  }
}

export const get = (url, signal) => ask("GET", url, { signal });
export const change = (method, url, body, signal) => ask(method, url, { body, signal });

/** All pages of a list up to `most` items. */
export async function list(parts, parameters = {}, { signal, most = 1000 } = {}) {
  const items = [];
  let cursor = null;
  do {
    const page = await get(path(parts, { limit: Math.min(1000, most), ...parameters, cursor }), signal);
    items.push(...page.items);
    cursor = page.next;
  } while (cursor && items.length < most);
  return items;
}

/** Run `work(signal)` now and every few seconds, one at a time; not while the page is hidden. After a failure sooner
 *  at first, so that a gateway that comes back is seen. told(problem) hears of failures. Returns what ends it. */
export function poll(work, told, every_ms = POLL_MS) {
  const end = new AbortController();
  let timer = 0;
  let failures = 0;
  let busy = false;
  async function turn() {
    clearTimeout(timer);
    if (busy || document.hidden || end.signal.aborted) return;
    busy = true;
    let wait_ms = every_ms;
    try {
      await work(end.signal);
      failures = 0;
    } catch (problem) {
      if (end.signal.aborted) return;
      if (!(problem instanceof Problem)) throw problem;
      told(problem);
      if (problem.status === 401) return;
      wait_ms = BACKOFF_MS[Math.min(failures, BACKOFF_MS.length - 1)];
      failures += 1;
    } finally {
      busy = false;
    }
    if (!document.hidden && !end.signal.aborted) timer = setTimeout(turn, wait_ms);
  }
  document.addEventListener("visibilitychange", turn, { signal: end.signal });
  turn();
  const stop = () => {
    clearTimeout(timer);
    end.abort();
  };
  stop.now = turn;
  return stop;
}

/** Server-sent events by way of fetch, since EventSource sends no token. Goes on from the last id after a loss; runs
 *  until the signal ends it. heard({kind, id, data}); state("live" | "lost", problem). */
export async function stream(url, { signal, heard, state }) {
  let last = "";
  for (let failures = 0; !signal.aborted; failures += 1) {
    try {
      const headers = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
      const answer = await send("GET", url, { signal, headers, timeout_ms: 0 });
      state("live");
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let kept = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        failures = 0;
        kept += value.replaceAll("\r", "");
        if (kept.length > STREAM_BUFFER_MAX) throw new Problem(0, "Too much", "An event was too large.");
        for (let end = kept.indexOf("\n\n"); end >= 0; end = kept.indexOf("\n\n")) {
          const event = event_of(kept.slice(0, end));
          kept = kept.slice(end + 2);
          if (event.id) last = event.id;
          if (event.data) heard(event);
        }
      }
      state("lost", null);
    } catch (problem) {
      if (signal.aborted) return;
      const known = problem instanceof Problem ? problem : new Problem(0, "Lost", "The connection ended.");
      state("lost", known);
      if ([400, 401, 403, 404].includes(known.status)) return;
    }
    await new Promise((go) => {
      const timer = setTimeout(go, BACKOFF_MS[Math.min(failures, BACKOFF_MS.length - 1)]);
      signal.addEventListener("abort", () => { clearTimeout(timer); go(); }, { once: true });
    });
  }
}

function event_of(text) {
  const event = { kind: "message", id: "", data: "" };
  for (const row of text.split("\n")) {
    const [, name, value] = /^([^:]*):? ?(.*)$/.exec(row);
    if (name === "event") event.kind = value;
    else if (name === "id") event.id = value;
    else if (name === "data") event.data += (event.data ? "\n" : "") + value;
  }
  return event;
}
