// The frame: who is signed in, which view is shown, whether the gateway answers.

import { Problem, get, line, session } from "./api.js";
import { block_view, namespace_view, namespaces_view } from "./blocks.js";
import { cluster_view, node_view } from "./cluster.js";
import { field, h, morph } from "./dom.js";
import { jobs_view } from "./jobs.js";
import { audit_view, events_view, requests_view } from "./logs.js";
import { empty, message, told } from "./parts.js";
import { settings_view } from "./settings.js";

const THEME = "kvpool-theme";
const UNKNOWN_TOKEN = "Your token is not known here.";
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const box = document.getElementById("session");
const menu = document.getElementById("menu"); // only there where the screen is narrow
const status = h("span", { role: "status" });
const who = h("span", null);
const colours = h("select", { "aria-label": "Colours", onchange: () => choose_colours(colours.value) },
  ["system", "light", "dark"].map((name) => h("option", { value: name }, `Colours: ${name}`)));
const out = h("button", { type: "button", onclick: () => sign_out("") }, "Sign out");
box.append(status, h("div", { class: "account" }, who, colours, out));

const VIEWS = [
  { name: "cluster", title: "Cluster", show: cluster_view },
  { name: "namespaces", title: "Namespaces", show: (root, ...rest) => (rest.length === 2 ? namespace_view(root, ...rest) : namespaces_view(root)) },
  { name: "jobs", title: "Jobs", show: jobs_view },
  { name: "requests", title: "Requests", show: requests_view },
  { name: "events", title: "Events", show: events_view },
  { name: "settings", title: "Settings", show: settings_view, whole: true },
  { name: "audit", title: "Audit", show: audit_view, role: "admin" },
  { name: "nodes", title: "Node", show: node_view, part_of: "cluster" },
  { name: "blocks", title: "Block", show: block_view, part_of: "namespaces" },
];

const allowed = (view) => session.may(view.role ?? "viewer") && (session.whole || !view.whole);

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
  const view = VIEWS.find((each) => each.name === name && allowed(each));
  draw_nav(view?.part_of ?? view?.name);
  document.title = title_words(rest.at(-1)?.slice(0, 40), view?.title ?? "Not found");
  window.scrollTo(0, 0);
  main.replaceChildren(h("p", { class: "quiet" }, "Loading…"));
  if (view) stop = view.show(main, ...rest) ?? (() => {});
  else main.replaceChildren(h("h1", { tabindex: "-1" }, "Nothing here"), empty("This view does not exist, or your role does not include it."));
  if (focus) main.focus({ preventScroll: true });
}

/** What sets a tab apart comes first; a cluster that is called like the product is not said twice. */
function title_words(...words) {
  return [...new Set([...words, session.cluster?.cluster, "kvpool"].filter(Boolean))].join(" · ");
}

function draw_nav(current) {
  nav.hidden = false;
  morph(nav, VIEWS.filter((view) => !view.part_of && allowed(view))
    .map((view) => h("a", { href: `#/${view.name}`, "aria-current": view.name === current ? "page" : null, "data-key": view.name }, view.title)));
  // On a narrow screen the views are in one line that scrolls.
  const shown = nav.querySelector("[aria-current]");
  if (shown) nav.scrollLeft = shown.offsetLeft - (nav.clientWidth - shown.offsetWidth) / 2;
}

// ---- the session -------------------------------------------------------------------------------------

function draw_session() {
  const state = standing === "lost" ? h("span", { class: "pill warn" }, "reconnecting…")
    : session.me ? h("span", { class: "pill good" }, "live") : null;
  const name = session.cluster?.cluster;
  morph(document.getElementById("cluster-name"), name ? [h("span", { class: "quiet" }, "cluster "), name] : null);
  morph(status, state);
  morph(who, session.me ? [h("b", null, session.me.name), " ", h("span", { class: "quiet" }, session.me.role)] : null);
  out.hidden = !session.me;
}

function show_menu(open) {
  menu.setAttribute("aria-expanded", String(open));
  box.classList.toggle("open", open);
}

function sign_in_form(why) {
  stop();
  stop = () => {};
  session.me = null;
  session.cluster = null;
  nav.hidden = true;
  document.title = title_words("Sign in");
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
  } }, h("h1", null, "Sign in"), field("Token", token, ["An operator makes one with ", h("code", null, "kvpool token NAME --role viewer --file FILE"),
    ", where FILE is the daemon's http_tokens. Without http_tokens it is in ", h("code", null, "http.token"), " in the folder of the daemon's socket. It is kept in this tab only."]), answer, go));
  token.focus();
}

/** Sign in with the token that is kept. Returns what went wrong, if anything. */
async function enter() {
  try {
    const me = await get("/v1/me");
    session.cluster = await get("/v1/cluster");
    session.me = me;
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
  sign_in_form(why);
}

line.addEventListener("change", ({ detail }) => {
  standing = detail;
  if (detail === "refused" && session.me) sign_out("Your token is not taken any more: it was removed, or replaced.");
  else draw_session();
});

// ---- colours -----------------------------------------------------------------------------------------

function choose_colours(chosen) {
  if (chosen === "system") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem(THEME);
  } else {
    document.documentElement.dataset.theme = chosen;
    localStorage.setItem(THEME, chosen);
  }
}

const kept = localStorage.getItem(THEME);
if (kept === "light" || kept === "dark") choose_colours(kept);
colours.value = document.documentElement.dataset.theme ?? "system";

// ---- begin -------------------------------------------------------------------------------------------

menu.addEventListener("click", () => show_menu(menu.getAttribute("aria-expanded") !== "true"));
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
