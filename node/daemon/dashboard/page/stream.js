// What the node tells: its state each second, rounds as they change, and notices. It reconnects by itself.

const SILENCE_MS = 8000; // without a state for so long, what is shown is old
const RETRY_MS = [1000, 2000, 4000, 8000, 15000];
const NOTICES_MAX = 500;

const SMOOTH = 0.3; // how much the last second counts in a rate of bytes

/** A node's status (see status.py) as the views take it: members and links by `id`, this node first among the members,
 * and what can be worked out from that and the state before. */
function stateOf(status, before) {
  const byId = (each, self) => ({ ...each, id: each.node_id, self });
  const members = [byId(status.itself, true), ...status.members.map((member) => byId(member, false))];
  const seconds = before ? status.time - before.time : 0;
  const links = status.links.map((link) => withRates(byId(link), before?.links.find(({ id }) => id === link.node_id), seconds));
  const known = 1 + Object.values(status.by_health).reduce((sum, count) => sum + count, 0); // members listed or not
  return { ...status, members, known, links, edges: edgesOf(members, links), trainer: status.trainer ?? {} };
}

function withRates(link, before, seconds) {
  const rate = (key) => {
    const last = before && seconds > 0 ? (link[key] + link[`payload_${key}`] - before[key] - before[`payload_${key}`]) / seconds : 0;
    return SMOOTH * last + (1 - SMOOTH) * (before?.[`${key}_per_s`] ?? last);
  };
  return { ...link, sent_per_s: rate("sent"), received_per_s: rate("received") };
}

/** The swarm's links as far as known, as pairs of places in `members`: our own, and those that live members have dialled.
 * They name whom they dialled by the beginning of the id; one that two live members share names nobody. */
function edgesOf(members, links) {
  const places = new Map(members.map(({ id }, place) => [id, place]));
  const beginnings = new Map();
  const live = members.filter((m) => !m.self && isLive(m));
  for (const { id } of live) beginnings.set(id.slice(0, 8), beginnings.has(id.slice(0, 8)) ? undefined : places.get(id));
  const pairs = [
    ...links.map(({ id }) => [0, places.get(id)]),
    ...live.flatMap(({ id, dialled }) => dialled.map((start) => [places.get(id), beginnings.get(start)])),
  ];
  const known = pairs.filter(([a, b]) => b !== undefined && a !== b).map(([a, b]) => [Math.min(a, b), Math.max(a, b)]);
  return [...new Map(known.map((pair) => [pair.join(), pair])).values()];
}

const itselfOf = (state) => state.members[0];

class Stream extends EventTarget {
  state = null;
  rounds = new Rounds();
  notices = [];
  evaluations = []; // held-out losses that this node has measured: {round, live, average, version}
  connection = "waiting"; // waiting: nothing heard yet; live; lost
  heardAt = null; // performance.now() of the last state
  lostAt = null;
  refused = false; // the node answers, and wants a token that this page does not have
  answers = false; // it answers, and has no place for one more listener
  complete = false; // all kept rounds are here

  #source = null;
  #openedAt = 0;
  #failures = 0;
  #noticesBegin = false;
  #fetching = false;
  #again = false;
  #newer = null; // rounds told of since the answer was asked for that is still to come
  #missed = true; // rounds may have changed that we were not told of
  #sureUntil = 0; // though none up to here

  start() {
    this.#open();
    setInterval(() => this.#listen(), 1000);
    addEventListener("online", () => this.#retry());
    document.addEventListener("visibilitychange", () => document.hidden || this.#listen());
  }

  #open() {
    const source = (this.#source = new EventSource("api/events"));
    this.#openedAt = performance.now();
    source.addEventListener("open", () => {
      this.#noticesBegin = true;
      this.#catchUp();
    });
    source.addEventListener("state", (event) => this.#takeState(JSON.parse(event.data)));
    source.addEventListener("evaluations", (event) => this.#takeEvaluations(JSON.parse(event.data)));
    source.addEventListener("rounds", (event) => this.#takeRounds(JSON.parse(event.data)));
    source.addEventListener("notice", (event) => this.#takeNotice(JSON.parse(event.data)));
    source.addEventListener("error", () => this.#giveUp(source));
  }

  #giveUp(source) {
    this.#lost();
    source.close(); // its own retrying stops for good at some errors
    if (source !== this.#source) return;
    this.#source = null;
    this.#askWhy();
    setTimeout(() => this.#retry(), RETRY_MS[Math.min(this.#failures++, RETRY_MS.length - 1)]);
  }

  /** A stream that ends does not say why. */
  async #askWhy() {
    const status = await fetch("api/state", { cache: "no-store" }).then(({ status }) => status, () => null);
    this.refused = status === 401;
    this.answers = status === 200;
    this.#tell("connection");
  }

  #retry() {
    if (this.#source === null) this.#open();
  }

  #listen() {
    const heardAt = Math.max(this.heardAt ?? 0, this.#openedAt);
    if (this.#source && performance.now() - heardAt > SILENCE_MS) this.#giveUp(this.#source); // nobody told us of its end
    this.#tell("second");
  }

  #lost() {
    if (this.connection === "lost") return;
    if (!this.#missed) this.#sureUntil = this.state?.closed_round ?? 0;
    this.#missed = true;
    this.lostAt = performance.now();
    this.connection = this.heardAt === null ? "waiting" : "lost";
    this.#tell("connection");
  }

  #takeState(status) {
    const state = stateOf(status, this.state);
    const other = this.state && (this.state.node_id !== state.node_id || this.state.swarm_id !== state.swarm_id);
    if (other) return location.reload(); // another node has this address now
    this.state = state;
    this.heardAt = performance.now();
    this.#failures = 0;
    const before = this.rounds.newest;
    this.rounds.clock = state.clock;
    this.rounds.addUp(state.swarm_tokens);
    this.#noteEvaluation(state.trainer);
    if (this.connection !== "live") {
      this.connection = "live";
      this.#tell("connection");
    }
    this.#tell("state");
    const { newest } = this.rounds;
    if (newest !== before) this.#tell("rounds", { fresh: [], from: Math.min(newest, before), to: Infinity });
  }

  /** All that the node has kept; `version` is that of the last one. */
  #takeEvaluations({ version, losses }) {
    this.evaluations = losses.map(([round, live, average]) => ({ round, live, average, version }));
    this.#tell("state");
  }

  #noteEvaluation({ val_loss, val_loss_average, val_round, val_version }) {
    if (!known(val_loss) || this.evaluations.at(-1)?.version === val_version) return;
    this.evaluations.push({ round: val_round, live: val_loss, average: val_loss_average, version: val_version });
    if (this.evaluations.length > ROUNDS_MAX) this.evaluations.shift();
  }

  #takeRounds(message) {
    for (const [round] of message.rounds) this.#newer?.add(round);
    const fresh = this.rounds.merge(message);
    this.rounds.addUp(this.state?.swarm_tokens);
    this.#tell("rounds", { fresh, from: Math.min(...message.rounds.map((row) => row[0])), to: Infinity });
  }

  #takeNotice(notice) {
    if (this.#noticesBegin) this.notices = []; // a new connection tells all kept ones again
    this.#noticesBegin = false;
    this.notices.push(notice);
    if (this.notices.length > NOTICES_MAX) this.notices.shift();
    this.#tell("notices");
  }

  /** All rounds. After a break: from what could still change when it began. */
  async #catchUp() {
    if (this.#fetching) return void (this.#again = true);
    this.#fetching = true;
    const source = this.#source;
    try {
      await this.#fetch(this.#sureUntil && this.#sureUntil + 1);
      if (source && source === this.#source) this.#missed = false;
      this.complete = true;
      this.#tell("rounds", { fresh: [], from: 0, to: -1 });
    } catch {
      setTimeout(() => this.#source && this.#catchUp(), RETRY_MS.at(-1)); // opening again does it, too
    }
    this.#fetching = false;
    if (this.#again) {
      this.#again = false;
      this.#catchUp();
    }
  }

  /** Rounds from one on. The node tells as many of the newest as one answer holds, so older ones are asked for then. */
  async #fetch(from) {
    for (let to = Infinity; to >= from; ) {
      const newer = (this.#newer = new Set());
      const before = to === Infinity ? "" : `&to=${to}`;
      const { oldest, authors, rounds } = await this.#get(`api/rounds?from=${from}${before}`).finally(() => (this.#newer = null));
      if (!rounds.length) return;
      const [[first]] = rounds;
      this.rounds.merge({ authors, rounds: rounds.filter(([round]) => !newer.has(round)) });
      this.#tell("rounds", { fresh: [], from: first, to });
      from = Math.max(from, oldest);
      to = first - 1;
    }
  }

  async #get(path) {
    const response = await fetch(path, { cache: "no-store" });
    if (!response.ok) throw new Error(`${path}: ${response.status}`);
    return response.json();
  }

  #tell(type, detail = {}) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
