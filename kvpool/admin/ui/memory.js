// What more memory would give, and why blocks are missed: the hit rate over memory, drawn by hand, and the same as a table.

import { plot } from "./charts.js";
import { h } from "./dom.js";
import { DASH, bytes, count, percent } from "./format.js";
import { card, empty, ranking, table } from "./parts.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [52, 52, 10, 24];
const NARROW = 420; // every second mark of the axis only
const RULES = 4;
const MARKED = [0.25, 0.5, 1, 2, 4, 8, 16, 32]; // of the present memory, on the axis

const WORDS = {
  full: "evicted, as its tier was full",
  quota: "evicted, as its namespace had used up its quota",
  ttl: "expired",
  operator: "evicted by an operator",
  removed: "removed by a client",
  corrupt: "dropped, as its checksum did not match",
  epoch: "of an ended epoch",
  superseded: "evicted, as its session has gone on without it",
  disk_lost: "on a disk that was lost",
  drained: "on a node that was drained",
  never_stored: "never stored",
  forgotten: "never stored, or not remembered",
  other_namespace: "stored in another namespace only",
  node_lost: "on a node that is gone",
  declined: "slower to load than to compute",
  late: "did not arrive in time",
  dropped_elsewhere: "dropped by another node",
  not_asked: "there, but not waited for",
};

const name_of = (point) => (point.times === null ? "infinite" : bytes(point.dram_bytes));

/** Draws what `/v1/memory` gives, each time that it is called. */
export function memory_plan() {
  let curve = null;
  const drawing = plot((width, height) => drawn(curve, width, height));
  return (found) => {
    curve = found.curve;
    if (curve.hit !== null) drawing.show();
    return memory_cards(found, drawing.element);
  };
}

/** What more memory gives at most, in words. More memory never gives less: what was measured may be above what was
 *  estimated from some of the blocks. */
function at_most({ hit, ceiling, error }) {
  if (hit >= ceiling) return ["More memory would give ", h("b", null, "no more hits"), `, as far as was measured; each point to within ${percent(error)}.`];
  return [h("b", null, `At most ${percent(ceiling)}`), ` with infinite memory; each point to within ${percent(error)}.`];
}

function memory_cards(found, drawing) {
  const { curve, misses } = found;
  const missed = Object.entries(misses).sort(([, one], [, other]) => other.blocks - one.blocks);
  return h("div", { class: "halves", "data-key": "memory" },
    card("What more memory would give", curve.hit === null ? empty("No blocks have been asked for yet.") : [
      h("p", { class: "small" }, `Tenant ${found.tenant}, ${bytes(curve.dram_bytes)} of memory`,
        curve.ssd_bytes ? ` and ${bytes(curve.ssd_bytes)} of disks` : "", `. Hit rate now ${percent(curve.hit)}. `, at_most(curve)),
      h("div", { class: "chart" }, drawing,
        h("details", { "data-key": "table" }, h("summary", null, "Show as table"), table("Hit rate over memory", [
          { name: "Memory", head: true, of: name_of },
          { name: "Times", num: true, of: (point) => (point.times === null ? DASH : String(point.times)) },
          { name: "Hit rate", num: true, of: (point) => percent(point.hit) },
        ], curve.points))),
    ]),
    card("Why blocks were missed", ranking(missed.map(([reason, { requests, blocks }]) => ({
      key: reason, name: WORDS[reason] ?? reason, note: `${count(requests)} ${requests === 1 ? "read" : "reads"}`,
      value: blocks, shown: `${count(blocks)} ${blocks === 1 ? "block" : "blocks"}`,
    })), "No read has missed a block.")));
}

function drawn({ points, ceiling }, width, height) {
  const finite = points.filter((point) => point.times !== null);
  const [least, most] = [Math.log2(finite[0].times), Math.log2(finite.at(-1).times)];
  const x = (times) => LEFT + ((Math.log2(times) - least) / (most - least)) * (width - LEFT - RIGHT);
  const y = (share) => TOP + (1 - share) * (height - TOP - BOTTOM);
  const marks = [];
  for (let n = 0; n <= RULES; n += 1) {
    marks.push(h("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(n / RULES), y2: y(n / RULES) }));
    marks.push(h("text", { class: "axis", x: LEFT - 8, y: y(n / RULES) + 4, "text-anchor": "end" }, percent(n / RULES)));
  }
  for (const times of MARKED.filter((_, number) => width >= NARROW || number % 2 === 0)) {
    marks.push(h("text", { class: "axis", x: x(times), y: height - 6, "text-anchor": "middle" }, times === 1 ? "now" : `${times}x`));
  }
  const line = `M${finite.map((point) => `${x(point.times).toFixed(1)} ${y(point.hit).toFixed(1)}`).join("L")}`;
  const now = finite.find((point) => point.times === 1);
  return h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Hit rate over memory; the table below has the numbers" },
    marks,
    h("path", { class: "area s0", d: `${line}L${x(finite.at(-1).times)} ${y(0)}L${x(finite[0].times)} ${y(0)}Z` }),
    h("path", { class: "series s0", d: line }),
    h("path", { class: "series s2", d: `M${LEFT} ${y(ceiling)}H${width - RIGHT}` }),
    h("text", { class: "axis", x: width - RIGHT + 6, y: y(ceiling) + 4 }, "infinite"),
    now ? h("circle", { class: "dot s0", cx: x(1), cy: y(now.hit), r: 4 }) : null);
}
