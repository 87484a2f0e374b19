// The frame: who is signed in, which view is shown, whether the gateway answers.

import { Problem, get, line, session } from "./api.js";
import { block_view, jobs_view, namespace_view, namespaces_view } from "./blocks.js";
import { cluster_view, node_view } from "./cluster.js";
import { field, h, morph } from "./dom.js";
import { audit_view, events_view, requests_view } from "./logs.js";
import { empty, message, told } from "./parts.js";

const THEME = "kvpool-theme";
const UNKNOWN_TOKEN = "Your token is not known here.";
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const box = document.getElementById("session");

const VIEWS = [
  { name: "cluster", title: "Cluster", show: cluster_view },
  { name: "namespaces", title: "Namespaces", show: (root, ...rest) => (rest.length === 2 ? namespace_view(root, ...rest) : namespaces_view(root)) },
  { name: "jobs", title: "Jobs", show: jobs_view },
  { name: "requests", title: "Requests", show: requests_view },
  { name: "events", title: "Events", show: events_view },
  { name: "audit", title: "Audit", show: audit_view, role: "admin" },
  { name: "nodes", title: "Node", show: node_view, part_of: "cluster" },
  { name: "blocks", title: "Block", show: block_view, part_of: "namespaces" },
];

let stop = () => {};
let standing = "live";

// ---- the address -------------------------------------------------------------------------------------

/** `#token=...` is taken, kept for this tab only, and gone from the address bar and the history. */
function take_token() {
  const found = /^#token=([^&]+)$/.exec(location.hash);
  if (!found) return;
  session.token = decodeURIComponent(found[1]);
  history.replaceState(null, "", `${location.pathname}${location.search}`);
}

function route() {
  if (!location.hash.startsWith("#/")) return { name: "cluster", rest: [] };
  const [name, ...rest] = location.hash.slice(2).split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part; // a broken escape: taken as it stands
    }
  });
  return { name, rest };
}

function show(focus) {
  stop();
  stop = () => {};
  const { name, rest } = route();
  const view = VIEWS.find((each) => each.name === name && session.may(each.role ?? "viewer"));
  draw_nav(view?.part_of ?? view?.name);
  document.title = `${rest.length ? `${rest.at(-1).slice(0, 40)} · ` : ""}${view?.title ?? "Not found"} · kvpool`;
  window.scrollTo(0, 0);
  main.replaceChildren(h("p", { class: "quiet" }, "Loading…"));
  if (view) stop = view.show(main, ...rest) ?? (() => {});
  else main.replaceChildren(h("h1", { tabindex: "-1" }, "Nothing here"), empty("This view does not exist, or your role does not include it."));
  if (focus) main.focus({ preventScroll: true });
}

function draw_nav(current) {
  nav.hidden = false;
  morph(nav, VIEWS.filter((view) => !view.part_of && session.may(view.role ?? "viewer"))
    .map((view) => h("a", { href: `#/${view.name}`, "aria-current": view.name === current ? "page" : null, "data-key": view.name }, view.title)));
}

// ---- the session -------------------------------------------------------------------------------------

function draw_session() {
  const state = standing === "lost" ? h("span", { class: "pill warn", id: "line" }, "reconnecting…")
    : session.me ? h("span", { class: "pill good", id: "line" }, "live") : null;
  morph(box, h("span", { role: "status" }, state),
    session.me ? h("span", null, h("b", null, session.me.name), " ", h("span", { class: "quiet" }, session.me.role)) : null,
    h("button", { type: "button", onclick: switch_theme, "data-key": "theme" }, dark() ? "Light" : "Dark", h("span", { class: "hidden-text" }, " colours")),
    session.me ? h("button", { type: "button", onclick: () => sign_out(""), "data-key": "out" }, "Sign out") : null);
}

function sign_in_form(why) {
  stop();
  stop = () => {};
  session.me = null;
  nav.hidden = true;
  document.title = "Sign in · kvpool";
  document.getElementById("cluster-name").textContent = "";
  draw_session();
  const token = h("input", { type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const answer = h("div", null, why ? message(why, "warn") : null);
  const go = h("button", { type: "submit", class: "main" }, "Sign in");
  main.replaceChildren(h("form", { class: "card sign-in", onsubmit: async (event) => {
    event.preventDefault();
    go.disabled = true;
    session.token = token.value.trim();
    const problem = await enter();
    go.disabled = false;
    if (problem) {
      session.token = "";
      morph(answer, message(problem.status === 401 ? "This token is not known here." : told(problem), "bad"));
      token.select();
    } else main.focus({ preventScroll: true }); // what had it is gone
  } }, h("h1", null, "Sign in"), field("Token", token, ["An operator makes one with ", h("code", null, "kvpool token NAME --role viewer"),
    ". Without http_tokens it is in ", h("code", null, "http.token"), " in the folder of the daemon's socket. It is kept in this tab only."]), answer, go));
  token.focus();
}

/** Sign in with the token that is kept. Returns what went wrong, if anything. */
async function enter() {
  try {
    session.me = await get("/v1/me");
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    return problem;
  }
  draw_session();
  show(false);
  return null;
}

function sign_out(why) {
  session.token = "";
  session.me = null;
  sign_in_form(why);
}

line.addEventListener("change", ({ detail }) => {
  standing = detail;
  if (detail === "refused" && session.me) sign_out("Your token is not taken any more: it was removed, or replaced.");
  else draw_session();
});

// ---- colours -----------------------------------------------------------------------------------------

const system_dark = matchMedia("(prefers-color-scheme: dark)");
const dark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system_dark.matches;
};

function switch_theme() {
  const chosen = dark() ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  localStorage.setItem(THEME, chosen);
  draw_session();
}

const kept = localStorage.getItem(THEME);
if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
system_dark.addEventListener("change", draw_session);

// ---- begin -------------------------------------------------------------------------------------------

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", async () => {
  if (location.hash.startsWith("#token=")) {
    take_token();
    const problem = await enter();
    if (problem) sign_out(problem.status === 401 ? UNKNOWN_TOKEN : told(problem));
  } else if (session.me) show(true);
});

async function begin() {
  take_token();
  draw_session();
  if (!session.token) return sign_in_form("");
  for (let wait_ms = 1000; ; wait_ms = Math.min(8000, wait_ms * 2)) {
    const problem = await enter();
    if (!problem) return undefined;
    if (problem.status === 401) return sign_out(UNKNOWN_TOKEN);
    if (problem.status !== 0 && problem.status < 500) return sign_out(told(problem));
    main.replaceChildren(message(`${told(problem)} Trying again…`, "warn"));
    await new Promise((go) => setTimeout(go, wait_ms));
  }
}

begin();
