// What the page's scripts do with what a node tells them, on a made-up clock, network and stream.
// Usage: node page_in_node.js FOLDER CASE
const assert = require("node:assert");
const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

const [, , folder, name] = process.argv;

const STATE = { node_id: "a", swarm_id: "s", clock: 3, closed_round: 0, round: 3, itself: { node_id: "a" }, time: 0, members: [], links: [], edges: [], by_health: {} };
const delta = (author, loss = 2) => [author, 10, 1, 0, loss, 0];
const row = (round, deltas, loss = 2) => [round, 0, loss, 10, 10, null, deltas];

/** A page without a document: its stream and timeline, and what they ask for. */
function page() {
  const world = { now: 0, timers: [], sources: [], status: 200, answers: () => ({ oldest: 1, authors: [], rounds: [] }) };
  class Source {
    constructor() {
      this.listeners = {};
      this.closed = false;
      world.sources.push(this);
    }
    addEventListener(type, listener) { this.listeners[type] = listener; }
    close() { this.closed = true; }
    tell(type, data) { this.listeners[type]({ data: JSON.stringify(data) }); }
  }
  const after = (every) => (run, ms) => void world.timers.push({ run, at: world.now + ms, every: every && ms });
  const context = vm.createContext({
    EventTarget, Event, CustomEvent, Intl, EventSource: Source,
    performance: { now: () => world.now }, setInterval: after(true), setTimeout: after(false), addEventListener() {},
    document: { addEventListener() {}, hidden: false, createElement: () => ({}), getElementById: () => ({ addEventListener() {}, style: {} }) },
    fetch: async (url) => ({ ok: world.status === 200, status: world.status, json: async () => world.answers(url) }),
  });
  const scripts = ["format.js", "dom.js", "rounds.js", "stream.js", "timeline.js", "header.js"];
  const text = scripts.map((file) => fs.readFileSync(path.join(folder, file), "utf8")).join("\n");
  const limit = text.replace("const ROUNDS_MAX = 20000", "const ROUNDS_MAX = 100");
  assert.notEqual(limit, text);
  vm.runInContext(`${limit}\nglobalThis.made = { stream: new Stream(), joiningInWords, stateOf }; made.timeline = new Timeline(made.stream.rounds);`, context);
  return Object.assign(world, context.made);
}

async function settled(turns = 1) {
  for (let turn = 0; turn < turns; turn++) await new Promise((done) => setImmediate(done));
}

/** Lets a page's node keep these rounds, and tell of so many at once; returns what is asked for from then on. */
function answering(world, kept, most) {
  const asked = [];
  world.answers = (url) => {
    const [, from, to] = url.match(/^api\/rounds\?from=(\d+)(?:&to=(\d+))?$/);
    asked.push(`${from}-${to ?? ""}`);
    const rounds = kept.filter(([round]) => round >= from && round <= (to ?? Infinity)).slice(-most);
    return structuredClone({ oldest: kept[0][0], authors: ["x"], rounds });
  };
  return asked;
}

/** A loss curve on a canvas that notes what is filled. */
function drawing() {
  const fills = [];
  const tool = new Proxy({}, { get: (kept, key) => kept[key] ?? (() => void (key === "fill" && fills.push(kept.fillStyle))), set: (kept, key, value) => Boolean((kept[key] = value)) || true });
  const element = () => ({ addEventListener() {}, setAttribute() {}, append() {}, style: {}, dataset: {}, clientWidth: 800, clientHeight: 210, getContext: () => tool });
  const context = vm.createContext({
    EventTarget, Event, CustomEvent, Intl, EventSource: class {}, performance, setInterval() {}, setTimeout() {}, addEventListener() {},
    document: { addEventListener() {}, createElement: element, getElementById: element }, matchMedia: () => ({ addEventListener() {} }),
  });
  const text = ["format.js", "dom.js", "rounds.js", "stream.js", "frames.js", "timeline.js", "curves.js"].map((file) => fs.readFileSync(path.join(folder, file), "utf8"));
  vm.runInContext(`${text.join("\n")}
    Object.assign(colours, { good: "good", pale: "pale" });
    globalThis.made = { stream: new Stream() };
    made.timeline = new Timeline(made.stream.rounds);
    made.curve = new LossCurve(made.timeline, { add() {}, invalidate() {} }, made.stream);`, context);
  return { ...context.made, tool, fills };
}

/** Lets time pass. */
async function pass(world, ms) {
  const end = world.now + ms;
  for (;;) {
    const next = world.timers.filter(({ at }) => at <= end).sort((a, b) => a.at - b.at)[0];
    if (!next) break;
    world.now = next.at;
    if (next.every) next.at += next.every;
    else world.timers.splice(world.timers.indexOf(next), 1);
    next.run();
    await settled();
  }
  world.now = end;
  await settled();
}

const cases = {
  /** A line that only falls silent is given up, and opened anew with growing pauses. */
  async silence() {
    const world = page();
    world.stream.start();
    world.sources[0].tell("open");
    world.sources[0].tell("state", STATE);
    await pass(world, 7000);
    assert.equal(world.stream.connection, "live");
    await pass(world, 3000);
    assert.equal(world.stream.connection, "lost");
    assert(world.sources[0].closed);
    await pass(world, 1000);
    assert.equal(world.sources.length, 2);
    await pass(world, 600000);
    assert(world.sources.length > 20 && world.sources.length < 60, `opened ${world.sources.length} times`);
    assert(world.sources.slice(0, -1).every(({ closed }) => closed));
    await pass(world, 15000); // one that has just been opened is not given up for the silence before
    if (world.sources.at(-1).closed) await pass(world, 15000);
    world.sources.at(-1).tell("open");
    world.sources.at(-1).tell("state", STATE);
    assert.equal(world.stream.connection, "live");
  },

  /** A node that wants another token by now is not one that does not answer. */
  async token() {
    const world = page();
    world.status = 401;
    world.stream.start();
    world.sources[0].listeners.error();
    await settled(5);
    assert(world.stream.refused && !world.stream.answers);
    world.status = 200; // it has no place for one more
    await pass(world, 1000);
    world.sources[1].listeners.error();
    await settled(5);
    assert(!world.stream.refused && world.stream.answers);
  },

  /** An answer that was asked for before a round changed says less of it. */
  async race() {
    const world = page();
    let answer;
    world.answers = () => new Promise((resolve) => (answer = resolve));
    world.stream.start();
    world.sources[0].tell("state", STATE);
    world.sources[0].tell("open");
    await settled();
    world.sources[0].tell("rounds", { authors: ["x", "y"], rounds: [row(3, [delta(0), delta(1)], 5)] });
    answer({ oldest: 2, authors: ["x"], rounds: [row(2, [delta(0)]), row(3, [delta(0)], 9)] });
    await settled();
    const { rounds } = world.stream;
    assert.equal(rounds.at(3).count, 2);
    assert.equal(rounds.at(3).loss, 5);
    assert.equal(rounds.at(2).count, 1);
    assert.equal(rounds.deltas, 3);
  },

  /** Rounds that are far apart, as after a swarm's clock was ahead, cost no more requests than others. */
  async apart() {
    const world = page();
    const kept = [1, 5, 1000000, 2000000].map((round) => row(round, [delta(0)]));
    const asked = answering(world, kept, 2);
    world.stream.start();
    world.sources[0].tell("state", { ...STATE, clock: 2000000, closed_round: 0, round: 3 });
    world.sources[0].tell("open");
    await settled(20);
    assert(world.stream.complete);
    assert.deepEqual(world.stream.rounds.list.map(({ round }) => round), [1, 5, 1000000, 2000000]);
    assert.deepEqual(asked, ["0-", "1-999999"]);
  },

  /** What changed during a break is asked for until it is all here, also where the next break comes before. */
  async breaks() {
    const world = page();
    const kept = [];
    for (let round = 1; round <= 9; round++) kept.push(row(round, [delta(0)]));
    const asked = answering(world, kept, 4);
    const open = async (closed_round) => {
      const source = world.sources.at(-1);
      source.tell("state", { ...STATE, clock: 9, closed_round, round: 9 });
      source.tell("open");
      await settled(20);
    };
    const lose = async () => {
      world.sources.at(-1).listeners.error();
      await pass(world, 1000);
    };
    world.stream.start();
    await open(2);
    assert.deepEqual(asked, ["0-", "1-5", "1-1"]);
    await lose();
    for (const line of kept) line[2] = 7;
    const answer = world.answers;
    world.answers = (url) => {
      if (url.includes("to=")) throw new Error("the node is gone again");
      return answer(url);
    };
    asked.length = 0;
    await open(5);
    assert.deepEqual(asked, ["3-"]);
    await lose();
    world.answers = answer;
    asked.length = 0;
    await open(8);
    assert.deepEqual(asked, ["3-", "3-5"], "not from round 6 on: of 3 to 5 nothing has come");
    assert.deepEqual(world.stream.rounds.list.map(({ loss }) => loss), [2, 2, 7, 7, 7, 7, 7, 7, 7]);
    await lose();
    asked.length = 0;
    await open(8);
    assert.deepEqual(asked, ["9-"]);
  },

  /** One liar's rounds of the future are neither in view nor the swarm's loss, until the swarm is there. */
  async ahead() {
    const { stream, timeline, sources } = page();
    stream.start();
    sources[0].tell("state", { ...STATE, clock: 500 });
    const told = [];
    for (let round = 401; round <= 500; round++) told.push(row(round, [delta(0), delta(1)]));
    for (let round = 502; round < 566; round++) told.push(row(round, [delta(2)], 1e6));
    sources[0].tell("rounds", { authors: ["x", "y", "liar"], rounds: told.slice(64) });
    timeline.span = 32;
    assert.deepEqual([...timeline.range], [469, 500]);
    assert.equal(stream.rounds.newestRound.loss, 2);
    timeline.show(32, 500);
    assert.equal(timeline.end, null, "it follows the newest");
    let changed = 0;
    stream.addEventListener("rounds", () => changed++);
    sources[0].tell("state", { ...STATE, clock: 501 });
    assert.deepEqual([...timeline.range], [471, 502]);
    assert.equal(changed, 1);
  },

  /** Authors of whom no delta is left are forgotten, and their places taken by others. */
  async authors() {
    const { rounds } = page().stream;
    for (let round = 1; round <= 1000; round++) rounds.merge({ authors: [`author ${round}`, "idle"], rounds: [row(round, [delta(0)])] });
    assert.equal(rounds.list.length, 100);
    assert.equal(rounds.indexOf.size, 100);
    assert(rounds.authors.length < 110);
    for (const { round, packed } of rounds.list) assert.equal(rounds.authors[packed[0]], `author ${round}`);
    rounds.merge({ authors: ["other"], rounds: [row(1000, [delta(0)])] });
    assert(!rounds.indexOf.has("author 1000") && rounds.indexOf.has("other"));
    assert.equal(rounds.deltas, 100);
  },

  /** Held-out losses are shown though they are above all that the nodes train on. */
  async heldout() {
    const { stream, timeline, curve, tool, fills } = drawing();
    const loss = (number) => 1.33 + 0.03 * Math.sin(number);
    const rounds = Array.from({ length: 200 }, (_, i) => row(i + 1, [delta(0, loss(i + 1))], loss(i + 1)));
    stream.rounds.merge({ authors: ["x"], rounds });
    stream.rounds.clock = 200;
    stream.evaluations = [10, 100, 150, 195].map((round) => ({ round, live: 1.44, average: round > 10 ? 1.3 : null, version: round }));
    for (const [span, inView, averaged] of [[32, 1, 1], [128, 3, 3], [1024, 4, 3]]) {
      timeline.span = span;
      fills.length = 0;
      curve.paint(tool, 800, 210);
      const drawn = (colour) => fills.filter((each) => each === colour).length;
      assert.deepEqual([drawn("pale"), drawn("good")], [inView, averaged], `of ${span} rounds`);
      assert(curve.vertical.high < 1.5 && curve.vertical.low < 1.3);
    }
  },

  /** Our own links, and those that the living have dialled, by the beginnings of ids; and what each carries. */
  async links() {
    const { stateOf } = page();
    const id = (n) => `${n}`.repeat(64);
    const member = (n, dialled = [], health = "alive", node_id = id(n)) => ({ node_id, health, dialled: dialled.map((d) => id(d).slice(0, 8)), replica: null });
    const edges = (own, ...members) => stateOf({ ...STATE, members, links: own.map((n) => ({ node_id: id(n) })) }).edges;
    assert.deepEqual(edges([1], member(1, [2]), member(2), member(3, [1, 2])), [[0, 1], [1, 2], [1, 3], [2, 3]]);
    assert.deepEqual(edges([9], member(1, [9]), member(2, [2])), []);
    assert.deepEqual(edges([], member(1, [2]), member(2, [1])), [[1, 2]]);
    assert.deepEqual(edges([], member(1, [2], "down"), member(2), member(3, [1])), []);
    const twin = id(2).slice(0, 8) + id(7).slice(8);
    assert.deepEqual(edges([], member(1, [2, 3]), member(2), member(3), member(4, [], "alive", twin)), [[1, 3]]);
    const link = (sent) => ({ node_id: id(1), sent, payload_sent: 0, received: 0, payload_received: 0 });
    let state = null;
    for (let time = 0; time < 40; time++) state = stateOf({ ...STATE, time, links: [link(100 * time)] }, state);
    assert(Math.abs(state.links[0].sent_per_s - 100) < 1);
    assert.equal(stateOf({ ...STATE, members: [member(1)], by_health: { alive: 900, down: 9 } }).known, 910);
  },

  /** Who is alone is told how others come: into an invited swarm nobody does by an address alone. */
  async alone() {
    const { joiningInWords } = page();
    const told = (admission, state = "serving") =>
      joiningInWords({ state, addresses: ["192.0.2.1:7700"], swarm_id: "ab".repeat(32), model: { admission } });
    assert.equal(told("open")[1], "gossamer node --join 192.0.2.1:7700 --swarm-id abababababab");
    assert.equal(told("invited")[1], "gossamer invite NODE_ID --join 192.0.2.1:7700");
    assert(told("invited")[0].includes("owner") && !told("open")[0].includes("owner"));
    assert.equal(told("invited", "joining")[1], "");
  },
};

cases[name]().catch((error) => {
  console.error(error);
  process.exit(1);
});
