// Members, links and events, as tables and words.

/** A table with rows by key and columns that can be sorted by. */
class Table {
  #sorted = null; // {column, down}
  #rows = [];

  /** `columns`: {title, text(row), value?(row) to sort by, number?, className?(row), hint?(row)} */
  constructor(table, columns, keyOf, hooks = {}) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.hooks = hooks;
    this.body = el("tbody");
    this.heads = columns.map((column) => {
      const head = el("th", { scope: "col", className: column.number ? "number" : "" });
      const button = el("button", { type: "button", textContent: column.title });
      button.addEventListener("click", () => this.#sortBy(column));
      head.append(button);
      return head;
    });
    table.append(el("thead", {}, el("tr", {}, ...this.heads)), this.body);
  }

  update(rows) {
    this.#rows = rows;
    const byKey = new Map(rows.map((row) => [this.keyOf(row), row]));
    const nodes = keyed(this.body, this.#inOrder().map(this.keyOf), (key) => this.#make(key));
    for (const node of nodes) this.#fill(node, byKey.get(node.key));
  }

  #sortBy(column) {
    const down = this.#sorted?.column === column ? !this.#sorted.down : Boolean(column.number);
    this.#sorted = { column, down };
    this.columns.forEach((c, i) => setAttribute(this.heads[i], "aria-sort", c === column ? (down ? "descending" : "ascending") : null));
    this.update(this.#rows);
  }

  #inOrder() {
    if (!this.#sorted) return this.#rows;
    const { column, down } = this.#sorted;
    const value = column.value ?? column.text;
    return [...this.#rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (!known(x) || !known(y)) return known(x) ? -1 : known(y) ? 1 : 0; // what is not known comes last
      const order = typeof x === "number" ? x - y : natural.compare(String(x), String(y));
      return down ? -order : order;
    });
  }

  #make(key) {
    const cells = this.columns.map((column, i) => el(i ? "td" : "th", { className: column.number ? "number" : "" }));
    if (cells[0]) cells[0].scope = "row";
    const row = el("tr", {}, ...cells);
    row.key = key;
    this.hooks.made?.(row, key);
    return row;
  }

  #fill(node, row) {
    this.columns.forEach((column, i) => {
      const cell = node.children[i];
      setText(cell, column.text(row));
      if (column.className) setAttribute(cell, "class", `${column.number ? "number " : ""}${column.className(row)}`.trim());
      if (column.hint) setAttribute(cell, "title", column.hint(row) || null);
    });
    this.hooks.filled?.(node, row);
  }
}

const HEALTH_WORDS = { alive: "alive", suspect: "suspect", down: "down", left: "left" };

function membersTable(focus) {
  const columns = [
    { title: "Name", text: (m) => nameOf(m) + (m.self ? " (this node)" : ""), hint: (m) => m.id, className: (m) => (m.self ? "self" : "") },
    { title: "Health", text: (m) => HEALTH_WORDS[m.health] ?? String(m.health), className: (m) => `health ${m.health in HEALTH_WORDS ? m.health : "left"}` },
    { title: "Role", text: (m) => (m.trains ? "trains" : "observes") },
    { title: "Round", text: (m) => whole(trained(m, "round")), value: (m) => trained(m, "round"), number: true },
    { title: "Tokens", text: (m) => amount(trained(m, "tokens")), value: (m) => trained(m, "tokens"), number: true },
    { title: "Tokens/s", text: (m) => amount(trained(m, "tokens_per_s")), value: (m) => trained(m, "tokens_per_s"), number: true },
    { title: "Loss", text: (m) => lossText(trained(m, "loss")), value: (m) => trained(m, "loss"), number: true },
    { title: "Fresh", text: (m) => percent(m.fresh), value: (m) => m.fresh, number: true },
    { title: "Codec", text: (m) => m.codec || UNKNOWN },
    { title: "Replica", text: replicaWord, hint: replicaInWords, className: (m) => (m.replica === "other" ? "bad" : "") },
    { title: "Device", text: (m) => m.device || UNKNOWN },
    { title: "Heard", text: (m) => (m.self ? UNKNOWN : heardText(m.heard_s)), value: (m) => m.heard_s, number: true },
    { title: "Contributions", text: contributionsText, hint: (m) => contributionsInWords(m.contributions), className: (m) => (m.contributions.verdict ? "warn" : "") },
  ];
  return new Table(byId("members-table"), columns, (m) => m.id, {
    made: (row, id) => {
      row.addEventListener("pointerenter", () => focus.point(id));
      row.addEventListener("pointerleave", () => focus.point(null));
      row.addEventListener("click", () => focus.choose(id));
    },
    filled: (row, member) => setAttribute(row, "data-health", member.health),
  });
}

/** A figure of training; one that never trained has none, whatever its row says. */
const trained = (m, field) => (m.trains || m.tokens > 0 ? m[field] : null);
const replicaWord = (m) => (m.self ? "this one" : ({ same: "identical", other: "differs", records: "other records" }[m.replica] ?? UNKNOWN));

function replicaInWords(m) {
  if (m.self) return "what the others are compared with";
  const said = { same: "identical to this node's", other: "differs from this node's", records: "made of other records: a late one is not in both yet" }[m.replica];
  return said ? `${said}, at round ${whole(m.replica_round)}` : "not known";
}
const heardText = (s) => (known(s) ? (s < 1 ? "now" : `${duration(s)} ago`) : UNKNOWN);
const contributionsText = ({ contributions }) => contributions.verdict || (contributions.judged ? "nothing noted" : UNKNOWN);

/** A member's latest judged rounds in one sentence. */
function contributionsInWords(found) {
  if (!found.judged) return "";
  if (!found.void && !found.clipped && !found.opposed) return `nothing noted in ${plural(found.judged, "round")}${agreeing(found)}`;
  const parts = [`of its latest ${plural(found.judged, "round")}`];
  parts.push(`${whole(found.void)} void`, `${whole(found.clipped)} clipped${found.clipped ? ` (by ${found.clip_factor.toFixed(1)} on average)` : ""}`);
  parts.push(`${whole(found.opposed)} against the others`);
  return parts.join(", ") + agreeing(found);
}

const agreeing = ({ agreement }) => (known(agreement) ? `; agreement with the others ${cosine(agreement)}` : "");

function linksTable(nameById) {
  const columns = [
    { title: "To", text: (l) => nameById(l.id), hint: (l) => l.id },
    { title: "Dialled by", text: (l) => (l.outbound ? "us" : "them") },
    { title: "In", text: (l) => byteRate(l.received_per_s), value: (l) => l.received_per_s, number: true },
    { title: "Out", text: (l) => byteRate(l.sent_per_s), value: (l) => l.sent_per_s, number: true },
    { title: "Received", text: (l) => bytes(received(l)), value: received, number: true, hint: (l) => `${bytes(l.payload_received)} of it payloads` },
    { title: "Sent", text: (l) => bytes(sent(l)), value: sent, number: true, hint: (l) => `${bytes(l.payload_sent)} of it payloads` },
    { title: "Payloads", text: (l) => payloadShare(l), value: (l) => l.payload_sent + l.payload_received, number: true },
    { title: "Dropped", text: (l) => whole(l.dropped), value: (l) => l.dropped, number: true, className: (l) => (l.dropped ? "warn" : "") },
  ];
  return new Table(byId("links-table"), columns, (l) => l.id);
}

// The node counts messages and payloads apart.
const sent = (l) => l.sent + l.payload_sent;
const received = (l) => l.received + l.payload_received;
const payloadShare = (l) => (sent(l) + received(l) > 0 ? percent((l.payload_sent + l.payload_received) / (sent(l) + received(l))) : UNKNOWN);

const EVENTS_SHOWN = 120;
const LEVELS = { info: "", warning: "warn", error: "bad" };

function showEvents(notices) {
  const newest = notices.slice(-EVENTS_SHOWN).reverse();
  const rows = keyed(byId("events"), newest, (notice) =>
    el("li", { className: LEVELS[notice.level] ?? "" },
      el("time", { dateTime: new Date(notice.time * 1000).toISOString(), textContent: when(notice.time) }),
      el("span", { textContent: (notice.level === "info" ? "" : `${notice.level}: `) + notice.text })));
  setText(byId("events-summary"), rows.length ? (notices.length > EVENTS_SHOWN ? `the latest ${EVENTS_SHOWN} of ${whole(notices.length)}` : "") : "nothing to report yet");
}
