// The swarm as nodes on a ring and threads between them, without a centre. Places follow from the names
// alone, so that every node shows the same picture; they move gently when members come and go.

const SETTLE_MS = 700;
const ROOMY = 16; // up to so many members there is room for words beside each
const PULL_FEW = 0.3, PULL_MANY = 0.62; // how far the longest threads are drawn to the centre; short ones less

const memberOrder = (a, b) => natural.compare(nameOf(a), nameOf(b)) || (a.id < b.id ? -1 : 1);

/** A number in [0, 1) that a node id always gives. */
const jitter = (id) => parseInt(String(id).slice(0, 6), 16) / 0x1000000 || 0;

class Graph {
  nodes = []; // in the order of the ring: {member, id, angle, reach, x, y, radius, ...}
  edges = []; // {a, b, own, rate}: nodes, whether it is a link of ours, bytes/s both ways (ours only)
  byId = new Map();
  self = null;
  #movedAt = -Infinity;
  #size = [0, 0];
  #towards = new Map(); // id -> the next node on the shortest way to ourselves

  /** Takes in a state; returns whether anything that is drawn differs. */
  update(state) {
    const members = [...state.members].sort(memberOrder);
    const rates = new Map(state.links.map((link) => [link.id, link.sent_per_s + link.received_per_s]));
    const before = this.nodes.map((node) => node.id).join();
    const fastest = Math.max(1, ...members.map((m) => m.tokens_per_s ?? 0));
    this.nodes = members.map((member) => {
      const node = this.byId.get(member.id) ?? { id: member.id, x: null, y: null };
      return Object.assign(node, { member, share: Math.max(0, member.tokens_per_s ?? 0) / fastest });
    });
    this.byId = new Map(this.nodes.map((node) => [node.id, node]));
    this.self = this.nodes.find((node) => node.member.self) ?? null;
    this.edges = state.edges.flatMap(([i, j]) => {
      const a = this.byId.get(state.members[i]?.id), b = this.byId.get(state.members[j]?.id);
      if (!a || !b || a === b) return [];
      const other = a === this.self ? b : b === this.self ? a : null;
      return [{ a, b, own: other !== null, rate: other ? (rates.get(other.id) ?? null) : null }];
    });
    this.#findWays();
    if (before !== this.nodes.map((node) => node.id).join()) this.#arrange();
  }

  /** Returns whether it is another size than before. */
  resize(width, height) {
    if (width === this.#size[0] && height === this.#size[1]) return false;
    this.#size = [width, height];
    this.#arrange(true);
    return true;
  }

  get center() {
    return { x: this.#size[0] / 2, y: this.#size[1] / 2 };
  }

  get narrow() {
    return this.#size[0] < 480;
  }

  get roomy() {
    return this.nodes.length <= ROOMY;
  }

  #arrange(at_once = false) {
    const [width, height] = this.#size;
    const count = this.nodes.length;
    if (!count || !width) return;
    const [mx, my] = this.roomy ? (this.narrow ? [58, 54] : [120, 56]) : this.narrow ? [18, 18] : [78, 78];
    const rx = Math.max(20, width / 2 - mx), ry = Math.max(20, height / 2 - my);
    const spacing = (Math.PI * (rx + ry)) / count;
    const angles = evenAngles(count, rx, ry);
    this.nodes.forEach((node, i) => {
      const give = count === 1 ? 0 : this.roomy ? 1 - 0.14 * jitter(node.id) : 1;
      node.angle = angles[i];
      // Between the ellipse's normal and its radius: names then keep clear of each other at the sides, too.
      node.outwards = Math.atan2(Math.sin(angles[i]), Math.cos(angles[i]) * Math.sqrt(Math.min(1, ry / rx)));
      node.toX = width / 2 + rx * give * Math.cos(angles[i]);
      node.toY = height / 2 + ry * give * Math.sin(angles[i]);
      node.room = Math.min(this.roomy ? 16 : 12, spacing * 0.42);
      if (node.x === null || at_once) {
        node.x = at_once || count === 1 ? node.toX : this.center.x + (node.toX - this.center.x) * 0.85;
        node.y = at_once || count === 1 ? node.toY : this.center.y + (node.toY - this.center.y) * 0.85;
      }
      node.fromX = node.x;
      node.fromY = node.y;
    });
    this.#movedAt = performance.now();
    if (at_once || stillness.matches) this.#movedAt = -Infinity;
  }

  /** Moves the nodes to where they are at `now`; returns whether they are still on their way. */
  settle(now) {
    const t = Math.min(1, Math.max(0, (now - this.#movedAt) / SETTLE_MS));
    const eased = 1 - (1 - t) ** 3;
    for (const node of this.nodes) {
      node.x = node.fromX + (node.toX - node.fromX) * eased;
      node.y = node.fromY + (node.toY - node.fromY) * eased;
      const least = Math.min(3.5, node.room);
      node.radius = node.member.trains ? least + (node.room - least) * Math.sqrt(node.share) : Math.max(least, node.room * 0.45);
    }
    return t < 1;
  }

  /** The control point of the thread between two nodes (a quadratic Bezier curve, bowed inwards). */
  bend(a, b) {
    const { x, y } = this.center;
    const long = Math.min(1, Math.hypot(a.x - b.x, a.y - b.y) / (0.55 * Math.min(...this.#size)));
    const stays = 1 - (this.roomy ? PULL_FEW : PULL_MANY) * long;
    return { x: x + ((a.x + b.x) / 2 - x) * stays, y: y + ((a.y + b.y) / 2 - y) * stays };
  }

  /** The node at a point, within a finger's reach, or null. */
  hit(x, y) {
    let best = null, least = 22;
    for (const node of this.nodes) {
      const distance = Math.hypot(node.x - x, node.y - y) - node.radius * 0.5;
      if (distance < least) [best, least] = [node, distance];
    }
    return best;
  }

  /** Nodes from `id` to ourselves along the fewest known links, or null. */
  wayHome(id) {
    const way = [this.byId.get(id)];
    while (way[0] && way.at(-1) !== this.self) {
      const next = this.#towards.get(way.at(-1).id);
      if (!next) return null;
      way.push(next);
    }
    return way[0] && way.length > 1 ? way : null;
  }

  neighbours(node) {
    return this.edges.flatMap((edge) => (edge.a === node ? [edge.b] : edge.b === node ? [edge.a] : []));
  }

  #findWays() {
    this.#towards.clear();
    if (!this.self) return;
    const near = new Map(this.nodes.map((node) => [node, []]));
    for (const { a, b } of this.edges) {
      near.get(a).push(b);
      near.get(b).push(a);
    }
    const seen = new Set([this.self]);
    for (const node of seen) { // a Set is walked in the order of insertion: breadth first
      for (const next of near.get(node)) {
        if (seen.has(next)) continue;
        seen.add(next);
        this.#towards.set(next.id, node);
      }
    }
  }
}

/** Angles of `count` points an equal way apart along an ellipse, beginning beside the top. */
function evenAngles(count, rx, ry) {
  const steps = 720;
  const lengths = [0];
  const at = (k) => -Math.PI / 2 + (2 * Math.PI * k) / steps;
  for (let k = 1; k <= steps; k++) {
    const dx = rx * (Math.cos(at(k)) - Math.cos(at(k - 1))), dy = ry * (Math.sin(at(k)) - Math.sin(at(k - 1)));
    lengths.push(lengths[k - 1] + Math.hypot(dx, dy));
  }
  const angles = [];
  for (let i = 0, k = 0; i < count; i++) {
    const wanted = (lengths[steps] * (i + (count % 2 ? 0 : 0.5))) / count;
    while (k < steps && lengths[k + 1] <= wanted) k++;
    angles.push(at(k));
  }
  return angles;
}
