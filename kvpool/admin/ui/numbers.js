// All that a node tells of itself, as rows: values in pairs, what is alike in tables, the rest under headings.

import { h } from "./dom.js";
import { DASH, by_name, count, title_of } from "./format.js";
import { card, namespace_name, pairs, short_key, table } from "./parts.js";

const ROWS_MAX = 20;
const COLUMNS_MAX = 12;
const KEY = /^[0-9a-f]{32}$/;
const SECTIONS = {
  failed_logins: "Failed logins", gone: "Blocks that left memory, by reason", tenants: "Tenants", fetch: "Loads from other nodes and tiers",
  paths: "Transports to other nodes", hot: "Prefixes that are read most", sampled: "Distributions", processes: "Processes",
};

const NAMED = new Set(["tenants", "namespaces", "peers", "failed_logins", "clean_share", "event_streams"]); // by names that people chose

const is_map = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const is_plain = (value) => !is_map(value) && !(Array.isArray(value) && value.some((each) => typeof each === "object"));
const is_histogram = (value) => is_map(value) && Array.isArray(value.bounds) && Array.isArray(value.counts);
const is_nothing = (value) => value === null || (typeof value === "object" && !Object.keys(value).length);

/** sections: of a node's detail, by name. */
export function numbers(sections) {
  const names = Object.keys(sections).filter((name) => typeof sections[name] === "object" && !is_nothing(sections[name]));
  if (!names.length) return null;
  const models = model_names(sections.tenants ?? {});
  return card("All numbers", names.map((name) => h("details", { "data-key": name },
    h("summary", null, SECTIONS[name] ?? title_of(name)), h("div", { class: "numbers" }, shown(name, sections[name], models)))));
}

/** Digests of namespaces with the names that people know. */
function model_names(tenants) {
  return new Map(Object.values(tenants).flatMap((tenant) => Object.entries(tenant.namespaces ?? {})
    .map(([digest, { fields }]) => [digest, namespace_name({ digest, fields: fields ?? {} })])));
}

function shown(name, value, models) {
  if (is_plain(value)) return pairs([[title_of(name), text_of(name, value, models)]]);
  if (is_histogram(value)) return spread(name, value);
  if (Array.isArray(value)) return rows_of(name, value.map((each, number) => [String(number + 1), each]), models, false);
  const parts = Object.entries(value);
  if (parts.length > 1 && are_alike(parts.map(([, each]) => each))) return rows_of(name, parts, models, true);
  const plain = parts.filter(([, each]) => is_plain(each));
  const alike = Map.groupBy(parts.filter(([, each]) => !is_plain(each) && !is_nothing(each)), ([each, of]) => form_of(of) ?? each);
  return [
    plain.length ? pairs(plain.map(([each, of]) => [label(name, each, models), text_of(each, of, models)])) : null,
    [...alike.values()].map((group) => (group.length > 1 ? rows_of(name, group, models, true)
      : group.map(([each, of]) => h("section", null, h("h3", null, label(name, each, models)), shown(each, of, models))))),
  ];
}

/** The names of a flat value of which several can be the rows of a table; null: it is none. */
function form_of(value) {
  if (!is_map(value) || is_histogram(value) || !Object.values(value).every(is_plain)) return null;
  const names = Object.keys(value);
  return names.length <= COLUMNS_MAX ? names.join() : null;
}

function are_alike(values) {
  const first = form_of(values[0]);
  return first !== null && values.every((value) => form_of(value) === first);
}

/** A table where the values are alike, else one after the other. named: the rows have names. */
function rows_of(name, rows, models, named) {
  if (!are_alike(rows.map(([, each]) => each))) {
    return rows.map(([each, of]) => h("section", null, h("h3", null, named ? label(name, each, models) : `${title_of(name)} ${each}`),
      is_plain(of) ? h("p", null, text_of(name, of, models)) : shown(each, of, models)));
  }
  const columns = Object.keys(rows[0][1]).map((column) => ({
    name: title_of(column), num: rows.every(([, each]) => typeof each[column] === "number" && column !== "pid"),
    of: ([, each]) => text_of(column, each[column], models),
  }));
  const head = named ? { name: "Of", head: true, of: ([each]) => label(name, each, models) } : null;
  if (!head) columns[0].head = true;
  const left = rows.length - ROWS_MAX;
  return [table(title_of(name), head ? [head, ...columns] : columns, rows.slice(0, ROWS_MAX)),
    left > 0 ? h("p", { class: "quiet small" }, `and ${count(left)} more`) : null];
}

/** How many values were at most as large as each bound, and more than the one before. */
function spread(name, { bounds, counts, sum }) {
  const all = counts.reduce((total, each) => total + each, 0);
  const unit = name.endsWith("_s") || ["seconds", "waits"].includes(name) ? "each_s" : name;
  const rows = counts.map((number, at) => [at < bounds.length ? `at most ${by_name(unit, bounds[at])}` : "more", number]).filter(([, number]) => number);
  return pairs([["Values", count(all)], ["Mean", all ? by_name(unit, sum / all) : DASH], ...rows.map(([text, number]) => [text, count(number)])]);
}

/** What one of the parts of `whole` is called. */
const label = (whole, name, models) => models.get(name) ?? (NAMED.has(whole) || !/^[a-z_0-9]+$/.test(name) ? name : title_of(name));

function text_of(name, value, models) {
  if (Array.isArray(value)) return value.map((each) => text_of(name, each, models)).flatMap((each, n) => (n ? [", ", each] : [each])).concat(value.length ? [] : [DASH]);
  if (typeof value === "string" && KEY.test(value)) return models.get(value) ?? short_key(value);
  return by_name(name, value);
}
