// Numbers in words. Whatever is not known (null, undefined, NaN) is an en dash, never a zero.

const UNKNOWN = "–";

const known = (x) => x !== null && x !== undefined && !Number.isNaN(x);

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clockTime = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const dayTime = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

/** Three significant digits with a decimal prefix: [number, prefix]. */
function scaled(x) {
  const prefixes = ["", "k", "M", "G", "T", "P"];
  let i = 0;
  let value = Math.abs(x);
  while (value >= 999.5 && i < prefixes.length - 1) {
    value /= 1000;
    i++;
  }
  const digits = value >= 99.5 || (i === 0 && Number.isInteger(value)) ? 0 : value >= 9.95 ? 1 : 2;
  return [(x < 0 ? "−" : "") + value.toFixed(digits), prefixes[i]];
}

/** 1234567 -> "1.23 M". A unit joins its prefix: (1.2e6, "B") -> "1.20 MB". */
function amount(x, unit = "") {
  if (!known(x)) return UNKNOWN;
  const [number, prefix] = scaled(x);
  return prefix + unit ? `${number}\u202f${prefix}${unit}` : number;
}

const bytes = (x) => amount(x, "B");
const byteRate = (x) => amount(x, "B/s");
const tokenRate = (x) => (known(x) ? `${amount(x)} tokens/s` : UNKNOWN);
const whole = (x) => (known(x) ? grouped.format(x) : UNKNOWN);
const lossText = (x) => (known(x) ? x.toFixed(x < 100 ? 3 : 1) : UNKNOWN);
const cosine = (x) => (known(x) ? (x < 0 ? "−" : "") + Math.abs(x).toFixed(3) : UNKNOWN);
const percent = (x) => (known(x) ? `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)}\u202f%` : UNKNOWN);
const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;
const shortId = (id) => (known(id) ? String(id).slice(0, 8) : UNKNOWN);

/** Seconds as people say them, two units at most. */
function duration(s) {
  if (!known(s)) return UNKNOWN;
  if (s < 1) return "under 1 s";
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  const hours = Math.floor(s / 3600);
  if (hours < 48) return `${hours} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function when(unix) {
  if (!known(unix)) return UNKNOWN;
  const date = new Date(unix * 1000);
  return Date.now() - date < 12 * 3600e3 ? clockTime.format(date) : dayTime.format(date);
}

/** Round marks for an axis: about `count` values, 1, 2 or 5 times a power of ten apart. */
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => (high - low) / s <= count + 0.51);
  const marks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) marks.push(k * step);
  return marks;
}

const LOG_STEPS = [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]];

/** Marks for a logarithmic axis: evenly spaced ones while it spans little, else the same in every power of ten. */
function logTicks(low, high, count) {
  if (high / low < 2) return ticks(low, high, count);
  const powers = Array.from({ length: Math.ceil(Math.log10(high / low)) + 2 }, (_, k) => 10 ** (Math.floor(Math.log10(low)) + k));
  const marks = LOG_STEPS.map((steps) => powers.flatMap((power) => steps.map((step) => step * power)).filter((mark) => mark >= low && mark <= high));
  return marks.find((found) => found.length <= count + 1) ?? marks.at(-1);
}

/** As many decimals as steps of this size need. */
const decimals = (step) => Math.max(0, -Math.floor(Math.log10(step) + 1e-9));

const isLive = (member) => member.health === "alive" || member.health === "suspect";

const natural = new Intl.Collator("en", { numeric: true });
/** What to call a member: its name is its own claim, so an empty one falls back to the id. */
const nameOf = (member) => (member.name ? String(member.name).slice(0, 40) : shortId(member.id));
