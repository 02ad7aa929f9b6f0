// The swarm's history as this page holds it: a round is a few numbers and one packed array of its deltas.

const LATE = 1, VOID = 2, CLIPPED = 4, OWN = 8;
const AUTHOR = 0, TOKENS = 1, STEPS = 2, STALENESS = 3, LOSS = 4, FLAGS = 5, WIDTH = 6;
const ROUNDS_MAX = 20000;

class Rounds {
  constructor() {
    this.authors = []; // node ids; what a packed AUTHOR refers to. null: free, as no round here is theirs any more
    this.indexOf = new Map();
    this.uses = []; // by author: how many deltas are here
    this.free = [];
    this.clock = Infinity; // the swarm's
    this.list = []; // by round, ascending
    this.deltas = 0;
  }

  get first() {
    return this.list.length ? this.list[0].round : null;
  }

  get last() {
    return this.list.length ? this.list[this.list.length - 1].round : null;
  }

  /** The last one that the swarm can have reached: anybody may sign deltas of later rounds. */
  get newestRound() {
    return this.list[Math.max(0, this.position(this.clock + 2) - 1)];
  }

  get newest() {
    return this.newestRound?.round ?? null;
  }

  /** Takes in a message of the node; returns [author id, round, flags] of the deltas that were not known. */
  merge(message) {
    const map = message.authors.map((id) => this.#author(id));
    const fresh = [];
    const incoming = message.rounds.map((row) => this.#packed(row, map)).sort((a, b) => a.round - b.round);
    for (const round of incoming) {
      const at = this.position(round.round);
      const old = this.list[at]?.round === round.round ? this.list[at] : null;
      this.#noteFresh(round, old, fresh);
      this.#count(round, 1);
      if (old) this.#count(old, -1);
      if (old) this.list[at] = round;
      else if (at === this.list.length) this.list.push(round);
      else this.list.splice(at, 0, round);
    }
    if (this.list.length > ROUNDS_MAX) {
      for (const gone of this.list.splice(0, this.list.length - ROUNDS_MAX)) this.#count(gone, -1);
    }
    this.#forget();
    return fresh;
  }

  /** Works out `total`, what the swarm has trained on up to each round, from what it has trained on by now. */
  addUp(swarmTokens) {
    let total = swarmTokens ?? NaN;
    for (const round of this.list.toReversed()) {
      round.total = round.merged === null ? NaN : total;
      total -= round.merged ?? 0;
    }
  }

  /** Index of the first round that is not below `round`. */
  position(round) {
    let low = 0, high = this.list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.list[middle].round < round) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  at(round) {
    const found = this.list[this.position(round)];
    return found?.round === round ? found : null;
  }

  /** Offset of a member's delta in a round's packed array, or -1. */
  deltaOf(round, author) {
    for (let i = 0; i < round.packed.length; i += WIDTH) if (round.packed[i] === author) return i;
    return -1;
  }

  #author(id) {
    let index = this.indexOf.get(id);
    if (index === undefined) {
      this.indexOf.set(id, (index = this.free.pop() ?? this.authors.length));
      this.authors[index] = id;
      this.uses[index] = 0;
    }
    return index;
  }

  #count(round, by) {
    this.deltas += by * round.count;
    for (let i = 0; i < round.packed.length; i += WIDTH) this.uses[round.packed[i]] += by;
  }

  /** Authors of whom no delta is left make room. */
  #forget() {
    for (const [id, index] of this.indexOf) {
      if (this.uses[index]) continue;
      this.indexOf.delete(id);
      this.authors[index] = null;
      this.free.push(index);
    }
  }

  #packed([round, time, loss, tokens, merged, agreement, deltas], map) {
    const packed = new Float32Array(deltas.length * WIDTH);
    let own = NaN, stale = 0, stalest = 0, counted = 0;
    deltas.forEach((delta, k) => {
      const at = k * WIDTH;
      packed[at + AUTHOR] = map[delta[0]];
      for (let field = TOKENS; field < WIDTH; field++) packed[at + field] = delta[field] ?? NaN;
      if (delta[FLAGS] & OWN) own = delta[LOSS] ?? NaN;
      if (delta[FLAGS] & VOID) return;
      stale += delta[STALENESS];
      stalest = Math.max(stalest, delta[STALENESS]);
      counted++;
    });
    return {
      round, time, packed, own, tokens, merged, total: NaN, loss: loss ?? NaN, agreement: agreement ?? NaN,
      count: deltas.length, stale: counted ? stale / counted : NaN, stalest: counted ? stalest : NaN,
    };
  }

  #noteFresh(round, old, fresh) {
    if (old && old.count >= round.count) return;
    const known = new Set();
    if (old) for (let i = 0; i < old.packed.length; i += WIDTH) known.add(old.packed[i]);
    for (let i = 0; i < round.packed.length; i += WIDTH) {
      if (!known.has(round.packed[i])) fresh.push([this.authors[round.packed[i]], round.round, round.packed[i + FLAGS]]);
    }
  }
}
