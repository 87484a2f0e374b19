// Elements from plain values. What comes from the API becomes text or attributes here, and never HTML.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "path", "line", "circle", "text", "rect"]);
const HANDLERS = ["onclick", "onchange", "oninput", "onsubmit", "onkeydown", "ontoggle"];

/** An element. props: attributes; functions become handlers; `style`: an object of CSS properties;
 *  true is the bare attribute; null, undefined and false are left out. */
export function h(tag, props, ...children) {
  const element = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element[name] = value;
    else if (name === "style") {
      for (const [property, each] of Object.entries(value)) element.style.setProperty(property, each);
    } else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}

/** Make these the children of `parent`, keeping the elements that are there and fit: focus, open details, what was
 *  typed and where was scrolled stay. Elements with `data-key` are matched by it. */
export function morph(parent, ...children) {
  const wanted = flat(children);
  const keyed = new Map();
  for (const child of parent.children) if (child.dataset.key) keyed.set(child.dataset.key, child);
  let at = parent.firstChild;
  for (const child of wanted) {
    const key = child.dataset?.key;
    let match = key ? keyed.get(key) : at;
    if (!key && at?.dataset?.key) match = null;
    if (match && alike(match, child)) {
      if (match !== at) parent.insertBefore(match, at);
      else at = at.nextSibling;
      update(match, child);
    } else parent.insertBefore(child, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function alike(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName &&
    (old.dataset?.key ?? "") === (fresh.dataset?.key ?? "");
}

function update(old, fresh) {
  if (old === fresh || old.dataset?.own !== undefined) return; // who says data-own keeps its own inside
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  const kept = old.nodeName === "DETAILS" ? ["style", "open"] : ["style"];
  for (const name of old.getAttributeNames()) {
    if (!fresh.hasAttribute(name) && !kept.includes(name)) old.removeAttribute(name);
  }
  for (const name of fresh.getAttributeNames()) {
    if (!kept.includes(name) && old.getAttribute(name) !== fresh.getAttribute(name)) {
      old.setAttribute(name, fresh.getAttribute(name));
    }
  }
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  for (const name of HANDLERS) if (old[name] !== fresh[name]) old[name] = fresh[name];
  if (old.nodeName !== "TEXTAREA") morph(old, ...fresh.childNodes);
}

let ids = 0;
export const fresh_id = (stem) => `${stem}-${++ids}`;

/** A label, a control, a hint under it. */
export function field(label, control, hint) {
  control.id ||= fresh_id("field");
  const below = hint ? h("span", { class: "hint", id: `${control.id}-hint` }, hint) : null;
  if (below) control.setAttribute("aria-describedby", below.id);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, below);
}

/** A dialog that takes the focus, keeps it, gives it back, and closes by Escape. build(dialog) gives what is in it.
 *  Returns the dialog; its `aborted` is a signal that ends with it. */
export function open_dialog(title, build) {
  const id = fresh_id("title");
  const dialog = h("dialog", { "aria-labelledby": id });
  const gone = new AbortController();
  const before = document.activeElement;
  dialog.aborted = gone.signal;
  const form = h("form", { method: "dialog", novalidate: true }, h("h2", { id }, title), build(dialog));
  dialog.append(form);
  dialog.addEventListener("close", () => {
    gone.abort();
    dialog.remove();
    // The browser gives the focus back itself, if there still is what had it.
    if (!before?.isConnected) document.getElementById("main").focus();
  });
  dialog.addEventListener("keydown", (event) => keep_inside(dialog, event));
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** A modal dialog lets Tab go on into the browser's own controls; here it goes round. */
function keep_inside(dialog, event) {
  if (event.key !== "Tab") return;
  const all = [...dialog.querySelectorAll("a[href], button, input, select, textarea, summary")]
    .filter((each) => !each.disabled && each.getClientRects().length > 0);
  const [first, last] = [all[0], all.at(-1)];
  const edge = event.shiftKey ? first : last;
  if (document.activeElement === edge) {
    event.preventDefault();
    (event.shiftKey ? last : first)?.focus();
  }
}

/** Say something in the corner; errors stay until they are closed. */
export function notify(text, kind = "") {
  const box = document.getElementById("notices");
  const close = h("button", { type: "button", class: "small", onclick: () => note.remove() }, "Close");
  const note = h("div", { class: `notice ${kind}` }, h("span", null, text), close);
  box.append(note);
  while (box.children.length > 4) box.firstChild.remove();
  if (kind !== "bad") setTimeout(() => note.remove(), 8000);
}
