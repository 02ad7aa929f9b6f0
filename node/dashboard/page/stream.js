// What the node tells: its state each second, rounds as they change, and notices. It reconnects by itself.

const RECENT = 512; // rounds asked for first, so that there is something to see at once
const PART = 500; // older ones are asked for in parts: none takes long to make, or to take in
const SILENCE_MS = 8000; // without a state for so long, what is shown is old
const RETRY_MS = [1000, 2000, 4000, 8000, 15000];
const NOTICES_MAX = 500;

class Stream extends EventTarget {
  state = null;
  rounds = new Rounds();
  notices = [];
  evaluations = []; // held-out losses that this node has measured: {round, loss, version}
  connection = "waiting"; // waiting: nothing heard yet; live; lost
  heardAt = null; // performance.now() of the last state
  lostAt = null;
  complete = false; // all kept rounds are here

  #source = null;
  #openedAt = 0;
  #failures = 0;
  #noticesBegin = false;
  #fetching = false;
  #again = false;
  #newer = null; // rounds told of since the answer was asked for that is still to come
  #sureUntil = 0; // rounds up to here cannot have changed while we did not listen

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
    setTimeout(() => this.#retry(), RETRY_MS[Math.min(this.#failures++, RETRY_MS.length - 1)]);
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
    if (this.complete) this.#sureUntil = this.state.now.closed_round ?? 0;
    this.lostAt = performance.now();
    this.connection = this.heardAt === null ? "waiting" : "lost";
    this.#tell("connection");
  }

  #takeState(state) {
    const other = this.state && (this.state.node.id !== state.node.id || this.state.swarm.id !== state.swarm.id);
    if (other) return location.reload(); // another node has this address now
    this.state = state;
    this.heardAt = performance.now();
    this.#failures = 0;
    const before = this.rounds.newest;
    this.rounds.clock = state.now.clock ?? Infinity;
    this.#noteEvaluation(state.now);
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
    this.evaluations = losses.map(([round, loss]) => ({ round, loss, version }));
    this.#tell("state");
  }

  #noteEvaluation(now) {
    if (!known(now.val_loss) || this.evaluations.at(-1)?.version === now.val_version) return;
    this.evaluations.push({ round: now.round, loss: now.val_loss, version: now.val_version });
    if (this.evaluations.length > ROUNDS_MAX) this.evaluations.shift();
  }

  #takeRounds(message) {
    for (const [round] of message.rounds) this.#newer?.add(round);
    const fresh = this.rounds.merge(message);
    this.#tell("rounds", { fresh, from: Math.min(...message.rounds.map((row) => row[0])), to: Infinity });
  }

  #takeNotice(notice) {
    if (this.#noticesBegin) this.notices = []; // a new connection tells all kept ones again
    this.#noticesBegin = false;
    this.notices.push(notice);
    if (this.notices.length > NOTICES_MAX) this.notices.shift();
    this.#tell("notices");
  }

  /** Recent rounds, then all. After a break: from what could still change when it began. */
  async #catchUp() {
    if (this.#fetching) return void (this.#again = true);
    this.#fetching = true;
    try {
      if (this.complete) {
        await this.#fetchRecent(this.#sureUntil + 1);
      } else {
        await this.#fetchAll();
        this.complete = true;
        this.#tell("rounds", { fresh: [], from: 0, to: -1 });
      }
    } catch {
      setTimeout(() => this.#source && this.#catchUp(), RETRY_MS.at(-1)); // opening again does it, too
    }
    this.#fetching = false;
    if (this.#again) {
      this.#again = false;
      this.#catchUp();
    }
  }

  async #fetchAll() {
    const { now } = this.state ?? (await this.#get("api/state"));
    let begin = Math.max(0, (now.clock ?? 0) - RECENT);
    const oldest = (await this.#fetchRecent(begin)) ?? begin;
    while (begin > oldest) {
      const to = begin - 1;
      begin = Math.max(oldest, begin - PART);
      this.rounds.mergeOlder(await this.#get(`api/rounds?from=${begin}&to=${to}`));
      this.#tell("rounds", { fresh: [], from: begin, to });
    }
  }

  /** Returns the oldest round that the node keeps. */
  async #fetchRecent(from) {
    const newer = (this.#newer = new Set());
    const message = await this.#get(`api/rounds?from=${from}`).finally(() => (this.#newer = null));
    this.rounds.merge({ ...message, rounds: message.rounds.filter(([round]) => !newer.has(round)) });
    this.#tell("rounds", { fresh: [], from, to: Infinity });
    return message.oldest;
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
