// Numbers as people read them: with units, of a length that does not jump.

const STEPS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const counts = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
export const DASH = "–";

export function bytes(value) {
  if (!Number.isFinite(value)) return DASH;
  let step = 0;
  let left = Math.abs(value);
  while (left >= 1023.5 && step < STEPS.length - 1) {
    left /= 1024;
    step += 1;
  }
  const digits = step === 0 || left >= 99.95 ? 0 : left >= 9.995 ? 1 : 2;
  return `${value < 0 ? "−" : ""}${trimmed(left, digits)} ${STEPS[step]}`;
}

const trimmed = (value, digits) => (Number.isInteger(value) ? String(value) : value.toFixed(digits));
export const rate = (value) => (Number.isFinite(value) ? `${bytes(value)}/s` : DASH);
export const count = (value) => (Number.isFinite(value) ? counts.format(value) : DASH);
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

export function percent(share) {
  if (!Number.isFinite(share)) return DASH;
  const value = share * 100;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  return `${value >= 99.95 || value === 0 ? value.toFixed(0) : value.toFixed(1)} %`;
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return DASH;
  if (seconds === 0) return "0 s";
  if (seconds < 1) return milliseconds(seconds);
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.round(seconds / 86400)} days`;
}

export function milliseconds(seconds) {
  if (!Number.isFinite(seconds)) return DASH;
  const value = seconds * 1000;
  return `${value >= 100 ? value.toFixed(0) : value.toPrecision(3).replace(/\.?0+$/, "")} ms`;
}

export const ago = (seconds) => (Number.isFinite(seconds) ? `${duration(seconds)} ago` : DASH);

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minutes = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const full = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" }); // as in logs: 2026-01-31 23:59:59
const offset = new Intl.DateTimeFormat("en-GB", { timeZoneName: "longOffset" });
export const time_of = (at_s) => clock.format(at_s * 1000);
export const minute_of = (at_s) => minutes.format(at_s * 1000);
export const date_of = (at_s) => full.format(at_s * 1000);

/** Whose times these are, the browser's: "UTC+01:00". */
export function zone(at_s = Date.now() / 1000) {
  const { value } = offset.formatToParts(at_s * 1000).find((part) => part.type === "timeZoneName");
  return value.replace("GMT", "UTC").replace(/\+00:00$/, "");
}

const CAPITALS = /\b(cpu|dram|gpu|http|id|io|nixl|numa|pid|ssd|ttl|url)\b/g;

/** A word that the API uses as people read it: `used_bytes` is "Used". */
export function title_of(name) {
  const words = name.replace(/^nbytes$/, "bytes").replace(/_(bytes|bytes_s|s|ms)$/, "").replaceAll("_", " ").trim()
    .replace(CAPITALS, (word) => word.toUpperCase());
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** A value by the unit that its name ends with. */
export function by_name(name, value) {
  if (value === null || value === undefined || value === "") return DASH;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") {
    if (name.endsWith("bytes_s")) return rate(value);
    if (/bytes$|^bytes_|(dram|ssd)_quota$|^size$|^stride$/.test(name)) return bytes(value);
    if (name === "pid") return String(value);
    if (name.endsWith("_ms")) return milliseconds(value / 1000);
    if (name.endsWith("_s")) return duration(value);
    if (/(^|_)(share|rate|ratio)$/.test(name)) return percent(value);
    return Number.isInteger(value) ? count(value) : String(Number(value.toPrecision(4)));
  }
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
