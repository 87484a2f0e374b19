// Line charts over time, drawn by hand: axes, a cursor for mouse and arrow keys, and the same as a table.

import { h, morph } from "./dom.js";
import { DASH, minute_of, time_of, zone } from "./format.js";

const LEFT = 68;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 24;
const RULES = 4;
const TABLE_ROWS = 60;
const SPAN_STEP_S = 300;
const TICKS_S = [60, 120, 300, 600, 900, 1200];

/** A chart in an element of its own. series: [{name, of(sample)}]; of gives a number or null.
 *  shown(value): its text. top: the least upper end of the axis; nice(value): that end as it is drawn. gap: so many
 *  samples without a value are a hole in the line. */
export function chart(title, series, { shown, top, nice, gap }) {
  const plot = h("div", {
    class: "plot", tabindex: "0", role: "slider", "aria-label": `${title}: choose a time with the arrow keys`,
    "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0",
  });
  const legend = h("div", { class: "legend" });
  const when = h("span", { class: "when" });
  const table = h("div", { class: "table-view", tabindex: "0", role: "region", "aria-label": `${title} as a table` });
  const more = h("details", { ontoggle: () => draw_table() }, h("summary", null, "Show as table"), table);
  const element = h("section", { class: "card", "data-own": "", "aria-label": title },
    h("div", { class: "head" }, h("h2", null, title), h("div", { class: "right" }, when)),
    h("div", { class: "chart" }, legend, plot, more));
  let samples = [];
  let every_s = 5;
  let span_s = 3600;
  let at = null; // the sample under the cursor; null: the newest
  let width = 600;
  let height = 190;

  const place = () => {
    const end = samples.length ? samples.at(-1).at_s : Date.now() / 1000;
    const values = samples.flatMap((sample) => series.map((each) => each.of(sample) ?? 0));
    const most = nice(Math.max(top, ...values));
    return {
      end, most,
      x: (at_s) => LEFT + (1 - (end - at_s) / span_s) * (width - LEFT - RIGHT),
      y: (value) => TOP + (1 - value / most) * (height - TOP - BOTTOM),
    };
  };

  function draw() {
    const { end, most, x, y } = place();
    const marks = [];
    for (let n = 0; n <= RULES; n += 1) {
      const value = (most * n) / RULES;
      marks.push(h("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      marks.push(h("text", { class: "axis", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, shown(value)));
    }
    const step = TICKS_S.find((each) => span_s / each <= (width < 480 ? 4 : 7)) ?? TICKS_S.at(-1);
    for (let t = Math.ceil((end - span_s) / step) * step; t <= end; t += step) {
      if (x(t) < LEFT + 12 || x(t) > width - RIGHT - 14) continue;
      marks.push(h("text", { class: "axis", x: x(t), y: height - 6, "text-anchor": "middle" }, minute_of(t)));
    }
    const lines = series.flatMap((each, number) => drawn(each, number, x, y));
    const cursor = [];
    if (samples.length) {
      const sample = samples[at ?? samples.length - 1];
      if (at !== null) {
        cursor.push(h("line", { class: "cursor", x1: x(sample.at_s), x2: x(sample.at_s), y1: TOP, y2: height - BOTTOM }));
      }
      series.forEach((each, number) => {
        const value = each.of(sample);
        if (value !== null) cursor.push(h("circle", { class: `dot s${number}`, cx: x(sample.at_s), cy: y(value), r: 4 }));
      });
    } else {
      marks.push(h("text", { class: "axis", x: (LEFT + width) / 2, y: height / 2 - 10, "text-anchor": "middle" }, "No samples yet"));
    }
    morph(plot, h("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" }, marks, lines, cursor));
    tell();
  }

  function drawn(each, number, x, y) {
    const runs = [];
    let run = null;
    let before = null;
    for (const sample of samples) {
      const value = each.of(sample);
      if (value === null) continue;
      if (before !== null && sample.at_s - before > (gap + 0.5) * every_s) run = null;
      before = sample.at_s;
      if (run === null) {
        run = [];
        runs.push(run);
      }
      run.push([x(sample.at_s), y(value)]);
    }
    return runs.flatMap((points) => {
      const [first, last] = [points[0], points.at(-1)];
      const path = `M${points.map(([px, py]) => `${px.toFixed(1)} ${py.toFixed(1)}`).join("L")}h0`;
      const area = `${path}L${last[0].toFixed(1)} ${y(0)}L${first[0].toFixed(1)} ${y(0)}Z`;
      return [h("path", { class: `area s${number}`, d: area }), h("path", { class: `series s${number}`, d: path })];
    });
  }

  function tell() {
    const sample = samples.length ? samples[at ?? samples.length - 1] : null;
    const text = (each) => {
      const value = sample ? each.of(sample) : null;
      return value === null ? DASH : shown(value);
    };
    morph(legend,
      series.map((each, number) => h("span", { class: "key" },
        h("svg", { width: 22, height: 8, "aria-hidden": "true" }, h("path", { class: `series s${number}`, d: "M1 4H21" })),
        h("span", null, each.name), h("b", null, text(each)))));
    when.textContent = sample ? `${at === null ? "now, " : "at "}${time_of(sample.at_s)} ${zone(sample.at_s)}` : "";
    plot.setAttribute("aria-valuemax", String(Math.max(0, samples.length - 1)));
    plot.setAttribute("aria-valuenow", String(at ?? Math.max(0, samples.length - 1)));
    plot.setAttribute("aria-valuetext", sample
      ? `${time_of(sample.at_s)}: ${series.map((each) => `${each.name} ${text(each)}`).join(", ")}` : "no samples yet");
  }

  function draw_table() {
    if (!more.open) return;
    const step = Math.max(1, Math.ceil(samples.length / TABLE_ROWS));
    const rows = samples.filter((_, number) => (samples.length - 1 - number) % step === 0).reverse();
    morph(table, h("table", null,
      h("caption", { class: "hidden-text" }, `${title}, newest first`),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Time"),
        series.map((each) => h("th", { scope: "col", class: "num" }, each.name)))),
      h("tbody", null, rows.map((sample) => h("tr", null, h("th", { scope: "row" }, time_of(sample.at_s)),
        series.map((each) => h("td", { class: "num" }, each.of(sample) === null ? DASH : shown(each.of(sample)))))))));
  }

  function point(number) {
    at = number === null || !samples.length ? null : Math.max(0, Math.min(samples.length - 1, number));
    draw();
  }

  plot.addEventListener("pointermove", (event) => {
    if (!samples.length) return;
    const { x } = place();
    const wanted = event.clientX - plot.getBoundingClientRect().left;
    let best = 0;
    samples.forEach((sample, number) => {
      if (Math.abs(x(sample.at_s) - wanted) < Math.abs(x(samples[best].at_s) - wanted)) best = number;
    });
    point(best);
  });
  plot.addEventListener("pointerleave", () => point(null));
  plot.addEventListener("blur", () => point(null));
  plot.addEventListener("keydown", (event) => {
    const now = at ?? samples.length - 1;
    const far = Math.max(1, Math.round(samples.length / 12));
    const to = { ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1,
      PageDown: now - far, PageUp: now + far, Home: 0, End: samples.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    point(to);
  });
  new ResizeObserver(([entry]) => {
    const box = entry.contentRect;
    if (!box.width) return;
    width = Math.round(box.width);
    height = Math.round(box.height);
    draw();
  }).observe(plot);

  return {
    element,
    /** seconds: as far back as is shown; null: as far as is known. */
    set(found, seconds_between, seconds) {
      const under = at === null ? null : samples[at]?.at_s;
      every_s = seconds_between;
      const known_s = found.length ? found.at(-1).at_s - found[0].at_s : 0;
      span_s = seconds ?? Math.max(SPAN_STEP_S, Math.ceil(known_s / SPAN_STEP_S) * SPAN_STEP_S);
      samples = found.filter((sample) => sample.at_s >= found.at(-1).at_s - span_s);
      if (under !== null) {
        const again = samples.findIndex((sample) => sample.at_s === under);
        at = again < 0 ? null : again;
      }
      draw();
      draw_table();
    },
  };
}

/** A drawing that is made anew for each width, so that its text keeps its size. draw(width, height): an SVG. */
export function plot(draw) {
  const element = h("div", { class: "plot still", "data-own": "" });
  let box = null;
  const show = () => box && morph(element, draw(box.width, box.height));
  new ResizeObserver(([entry]) => {
    if (!entry.contentRect.width) return;
    box = { width: Math.round(entry.contentRect.width), height: Math.round(entry.contentRect.height) };
    show();
  }).observe(element);
  return { element, show };
}

/** The next end of an axis in bytes whose quarters are short numbers, too. */
export function nice_bytes(value) {
  let unit = 1;
  while (unit * 1024 <= value) unit *= 1024;
  for (const times of [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]) {
    if (unit * times >= value) return unit * times;
  }
  return value;
}

/** Samples of the last hour, fetched whole once and then only what is new. */
export class History {
  constructor(seconds = 3600) {
    this.seconds = seconds;
    this.every_s = 5;
    this.samples = [];
  }

  async refresh(get, path, signal) {
    const newest = this.samples.at(-1)?.at_s;
    const behind = newest === undefined ? this.seconds : Date.now() / 1000 - newest + 3 * this.every_s;
    const seconds = Math.ceil(Math.min(this.seconds, Math.max(30, behind)));
    const found = await get(path(["history"], { seconds }), signal);
    this.every_s = found.every_s;
    const first = found.samples[0]?.at_s ?? Infinity;
    const all = [...this.samples.filter((sample) => sample.at_s < first), ...found.samples];
    const end = all.at(-1)?.at_s ?? 0;
    this.samples = all.filter((sample) => sample.at_s > end - this.seconds);
  }
}

/** A number of a sample: of one node, or of all together. */
export function summed(name, node = null) {
  return (sample) => {
    const nodes = node === null ? Object.values(sample.nodes) : [sample.nodes[node]];
    const values = nodes.map((each) => each?.[name]).filter(Number.isFinite);
    return values.length ? values.reduce((sum, value) => sum + value, 0) : null;
  };
}

/** The share of what was asked for that was found; all nodes: weighed by what they read. */
export function hit_rate(node = null) {
  return (sample) => {
    if (node !== null) return sample.nodes[node]?.hit_rate ?? null;
    const known = Object.values(sample.nodes).filter((each) => Number.isFinite(each.hit_rate));
    if (!known.length) return null;
    const weights = known.map((each) => each.read_bytes_s || 0);
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return known.reduce((total, each, n) => total + each.hit_rate * (sum ? weights[n] / sum : 1 / known.length), 0);
  };
}

/** The mean of what is known of the last so many samples; null: nothing is. */
export function mean_of_last(samples, many, of) {
  const values = samples.slice(-many).map(of).filter(Number.isFinite);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}
