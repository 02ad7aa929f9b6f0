// Draws the graph: hairline threads, nodes by health, and lights for deltas on their way.

const HOP_MS = 650;
const LIGHTS_MAX = 40;
const TAIL = 0.3; // a light's tail, as a share of the thread

class Threads {
  graph = new Graph();
  canvas = byId("graph");
  #lights = []; // {way: nodes, began: ms, colour}
  #overlay = byId("lights"); // above the canvas, so that what stands still is not drawn again
  #stale = true;

  constructor(frames, focus) {
    this.frames = frames;
    this.focus = focus;
    frames.add(this);
    this.#listen();
    focus.addEventListener("member", () => this.refresh());
  }

  update(state) {
    this.graph.update(state);
    const summary = swarmInWords(state);
    setText(byId("graph-summary"), summary);
    setAttribute(this.canvas, "aria-label", `The swarm: ${summary}. The table of members has the same in words.`);
    this.refresh();
  }

  refresh() {
    this.#stale = true;
    this.frames.invalidate(this);
  }

  /** Lights up the way of deltas that have just become known: [author id, round, flags]. */
  show(fresh) {
    if (stillness.matches || document.hidden) return;
    const began = performance.now();
    for (const [id, , flags] of fresh.slice(-LIGHTS_MAX)) {
      const colour = flags & VOID ? "bad" : flags & LATE ? "warn" : "accent";
      const self = this.graph.self;
      if (self && id === self.id) {
        for (const next of this.graph.neighbours(self)) this.#lights.push({ way: [self, next], began, colour });
      } else {
        const node = this.graph.byId.get(id); // without a known way, only its author lights up
        if (node) this.#lights.push({ way: this.graph.wayHome(id) ?? [node], began: began + 400 * jitter(id), colour });
      }
    }
    this.#lights.splice(0, this.#lights.length - LIGHTS_MAX);
    this.frames.invalidate(this);
  }

  draw(now) {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width || !height) return false;
    const resized = this.graph.resize(width, height);
    const moving = this.graph.settle(now);
    if (this.#stale || moving || resized) this.#paintStill();
    const [context] = surface(this.#overlay);
    this.#lights = this.#lights.filter((light) => now < light.began + HOP_MS * Math.max(1, light.way.length - 1));
    for (const light of this.#lights) this.#drawLight(context, light, now);
    return moving || this.#lights.length > 0;
  }

  #paintStill() {
    this.#stale = false;
    const [context] = surface(this.canvas);
    const focused = this.graph.byId.get(this.focus.pointed ?? this.focus.chosen) ?? null;
    this.#drawThreads(context, focused);
    for (const node of this.graph.nodes) this.#drawNode(context, node, node === focused);
    for (const node of this.graph.nodes) this.#drawLabel(context, node, focused);
  }

  #drawThreads(context, focused) {
    const crowd = Math.min(1, 40 / Math.max(1, this.graph.edges.length));
    for (const edge of this.graph.edges) {
      const near = focused ? edge.a === focused || edge.b === focused : edge.own;
      context.globalAlpha = near ? 0.8 : focused ? 0.2 + 0.15 * crowd : 0.45 + 0.4 * crowd;
      context.strokeStyle = near ? colours.accent : colours.thread;
      context.lineWidth = near ? 0.7 + Math.min(1, Math.log10(1 + (edge.rate ?? 0) / 1e4) * 0.3) : 0.7;
      const bend = this.graph.bend(edge.a, edge.b);
      context.beginPath();
      context.moveTo(edge.a.x, edge.a.y);
      context.quadraticCurveTo(bend.x, bend.y, edge.b.x, edge.b.y);
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  #drawNode(context, node, focused) {
    const { x, y, member } = node;
    const colour = { alive: colours.accent, suspect: colours.warn, down: colours.bad, left: colours.faint }[member.health] ?? colours.faint;
    const gone = member.health === "down" || member.health === "left";
    const radius = gone ? Math.min(4.5, node.room) : node.radius;
    const ring = (r, stroke, thickness, dash = []) => {
      context.beginPath();
      context.arc(x, y, r, 0, 2 * Math.PI);
      context.setLineDash(dash);
      context.lineWidth = thickness;
      context.strokeStyle = stroke;
      context.stroke();
      context.setLineDash([]);
    };
    context.beginPath(); // threads end at the rim
    context.arc(x, y, radius + 1.5, 0, 2 * Math.PI);
    context.fillStyle = colours.surface;
    context.fill();
    if (gone || !member.trains) ring(Math.max(2, radius - 0.7), colour, 1.4);
    if (!gone) {
      context.beginPath();
      context.arc(x, y, member.trains ? radius : radius * 0.35, 0, 2 * Math.PI);
      context.fillStyle = colour;
      context.fill();
    }
    if (member.health === "down") cross(context, x, y, radius * 0.45, colour);
    if (member.health === "suspect") ring(radius + 3, colour, 1.2, [2.5, 2.5]);
    if (member.replica === "other") ring(radius + 3.2, colours.bad, 1.8);
    if (member.self) ring(radius + 3.5, colours.ink, 1.3);
    if (focused) ring(radius + 6, colours.accent, 1);
  }

  #drawLabel(context, node, focused) {
    const { member } = node;
    const chosen = node === focused || member.self;
    const crowded = !this.graph.roomy;
    if (crowded && this.graph.narrow && !chosen) return;
    context.fillStyle = chosen ? colours.ink : colours.muted;
    context.textBaseline = "middle";
    const name = (member.replica === "other" ? "≠ " : "") + nameOf(member);
    if (crowded && !this.graph.narrow) return this.#labelOutwards(context, node, clipText(name, 10), chosen);
    if (crowded) return this.#labelInwards(context, node, name);
    const out = node.radius + 9;
    const dx = Math.cos(node.angle), dy = Math.sin(node.angle);
    const beside = Math.abs(dx) > 0.35 && !this.graph.narrow;
    const x = beside ? node.x + Math.sign(dx) * out : node.x;
    const y = beside ? node.y + dy * 4 : node.y + Math.sign(dy || 1) * (out + 11);
    const speed = known(member.tokens_per_s) && member.trains ? `${amount(member.tokens_per_s)} tokens/s` : "";
    const below = member.health === "alive" ? speed : member.health;
    context.textAlign = beside ? (dx > 0 ? "left" : "right") : "center";
    context.font = font(13, chosen ? 600 : 500);
    const offset = below ? 8 : 0;
    context.fillText(clipText(name, this.graph.narrow ? 10 : 16), x, y - offset);
    if (!below) return;
    context.font = font(11.5);
    context.fillStyle = member.health === "down" ? colours.bad : member.health === "suspect" ? colours.warn : colours.muted;
    context.fillText(below, x, y + offset);
  }

  #labelOutwards(context, node, name, chosen) {
    const angle = node.outwards;
    const left = Math.cos(angle) < 0;
    context.save();
    context.translate(node.x, node.y);
    context.rotate(left ? angle + Math.PI : angle);
    context.textAlign = left ? "right" : "left";
    context.font = font(11, chosen ? 650 : 400);
    context.fillText(name, (left ? -1 : 1) * (node.radius + (chosen ? 10 : 7)), 0);
    context.restore();
  }

  #labelInwards(context, node, name) {
    const { x, y } = this.graph.center;
    const inwards = 26 / Math.max(1, Math.hypot(x - node.x, y - node.y));
    const aside = Math.abs(node.x - x) > 0.5 * x;
    context.font = font(12, 600);
    context.textAlign = !aside ? "center" : node.x > x ? "right" : "left";
    context.lineWidth = 4;
    context.strokeStyle = colours.surface; // keeps the threads from the letters
    for (const draw of ["strokeText", "fillText"]) {
      context[draw](clipText(name, 14), node.x + (x - node.x) * inwards * (aside ? 0.7 : 1), node.y + (y - node.y) * inwards);
    }
  }

  #drawLight(context, { way, began, colour }, now) {
    const gone = (now - began) / HOP_MS;
    if (gone < 0) return;
    if (way.length === 1) return pulse(context, way[0], colour, gone);
    const hop = Math.min(way.length - 2, Math.floor(gone));
    const a = way[hop], b = way[hop + 1];
    const bend = this.graph.bend(a, b);
    const t = easeBoth(gone - hop);
    const point = (s) => [
      (1 - s) ** 2 * a.x + 2 * s * (1 - s) * bend.x + s * s * b.x,
      (1 - s) ** 2 * a.y + 2 * s * (1 - s) * bend.y + s * s * b.y,
    ];
    context.strokeStyle = context.fillStyle = colours[colour];
    context.lineWidth = 1.4;
    for (let k = 0; k < 6; k++) { // the tail fades backwards
      const s0 = Math.max(0, t - (TAIL * (6 - k)) / 6), s1 = Math.max(0, t - (TAIL * (5 - k)) / 6);
      context.globalAlpha = (k + 1) / 8;
      context.beginPath();
      context.moveTo(...point(s0));
      context.lineTo(...point(s1));
      context.stroke();
    }
    context.globalAlpha = 1;
    context.beginPath();
    context.arc(...point(t), 2.3, 0, 2 * Math.PI);
    context.fill();
  }

  #listen() {
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return this.graph.hit(event.clientX - box.left, event.clientY - box.top)?.id ?? null;
    };
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch") this.focus.point(at(event));
    });
    this.canvas.addEventListener("pointerleave", () => this.focus.point(null));
    this.canvas.addEventListener("click", (event) => this.focus.choose(at(event)));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") return this.focus.choose(null);
      if (!step || !this.graph.nodes.length) return;
      event.preventDefault();
      const ids = this.graph.nodes.map((node) => node.id);
      const from = ids.indexOf(this.focus.chosen ?? this.graph.self?.id);
      this.focus.choose(ids[(from + step + ids.length) % ids.length]);
    });
  }
}

const easeBoth = (t) => (t < 0.5 ? 2 * t * t : 1 - 2 * (1 - t) ** 2);
const clipText = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function pulse(context, { x, y, radius }, colour, gone) {
  context.beginPath();
  context.arc(x, y, radius + 2 + 10 * gone, 0, 2 * Math.PI);
  context.globalAlpha = 0.7 * (1 - gone);
  context.strokeStyle = colours[colour];
  context.lineWidth = 1.2;
  context.stroke();
  context.globalAlpha = 1;
}

function cross(context, x, y, r, colour) {
  context.beginPath();
  context.moveTo(x - r, y - r);
  context.lineTo(x + r, y + r);
  context.moveTo(x + r, y - r);
  context.lineTo(x - r, y + r);
  context.strokeStyle = colour;
  context.lineWidth = 1.2;
  context.stroke();
}
