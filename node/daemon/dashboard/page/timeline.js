// The rounds in view, shared by all strips: one range, one cursor, one horizontal scale.

const GUTTER = 76, GUTTER_NARROW = 58, MARGIN = 10;
const SPAN_MIN = 8;

class Timeline extends EventTarget {
  span = 128; // rounds in view; Infinity: all
  end = null; // the last round in view; null: follow the newest
  byTokens = false; // the loss' horizontal axis
  cursor = null; // the round pointed at
  row = null; // the member id pointed at, in the matrix
  quiet = false;

  constructor(rounds) {
    super();
    this.rounds = rounds;
  }

  /** [first, last] round in view. The newest is at the right edge even when there are few. */
  get range() {
    const newest = this.rounds.newest ?? 0, oldest = this.rounds.first ?? 0;
    const span = Math.max(SPAN_MIN, Math.min(this.span, newest - oldest + 1));
    const last = Math.min(newest, Math.max(this.end ?? newest, oldest + span - 1));
    return [last - span + 1, last];
  }

  /** The strip's scale: where a round's column begins, how wide it is, and which round is at x. */
  scale(width) {
    const left = width < 560 ? GUTTER_NARROW : GUTTER;
    const [first, last] = this.range;
    const step = (width - left - MARGIN) / (last - first + 1);
    return {
      left, right: width - MARGIN, first, last, step,
      x: (round) => left + (round - first) * step,
      middle: (round) => left + (round - first + 0.5) * step,
      round: (x) => Math.max(first, Math.min(last, first + Math.floor((x - left) / step))),
    };
  }

  /** Rounds of the history that are in view, as [begin, end) of `rounds.list`. */
  get slice() {
    const [first, last] = this.range;
    return [this.rounds.position(first), this.rounds.position(last + 1)];
  }

  show(span, end = null) {
    this.span = span;
    this.end = end !== null && end >= (this.rounds.newest ?? 0) ? null : end;
    this.#tell("range");
  }

  zoom(factor, around = null) {
    const [first, last] = this.range;
    const fixed = around ?? (this.end === null ? last : (first + last) / 2);
    const span = Math.max(SPAN_MIN, Math.round((last - first + 1) * factor));
    const whole = (this.rounds.newest ?? 0) - (this.rounds.first ?? 0) + 1;
    if (span >= whole) return this.show(Infinity);
    const share = (last - fixed) / (last - first + 1);
    this.show(span, Math.round(fixed + share * span));
  }

  pan(by) {
    const [first, last] = this.range;
    if (Math.round(by)) this.show(Number.isFinite(this.span) ? this.span : last - first + 1, Math.max((this.rounds.first ?? 0), last + Math.round(by)));
  }

  setByTokens(byTokens) {
    this.byTokens = byTokens;
    this.#tell("range");
  }

  /** `quiet`: what there is to say is said beside the pointer already. */
  point(round, row = null, quiet = false) {
    if (round === this.cursor && row === this.row) return;
    this.quiet = quiet;
    this.cursor = round;
    this.row = row;
    this.#tell("cursor");
  }

  #tell(type) {
    this.dispatchEvent(new Event(type));
  }
}

/** A canvas under the timeline: a painted body that is kept, and the cursor on top of it. */
class Strip {
  #body = document.createElement("canvas");
  #stale = true;

  constructor(canvas, timeline, frames) {
    this.canvas = canvas;
    this.timeline = timeline;
    this.frames = frames;
    frames.add(this);
    timeline.addEventListener("range", () => this.refresh());
    timeline.addEventListener("cursor", () => frames.invalidate(this));
    this.#listen();
  }

  refresh() {
    this.#stale = true;
    this.frames.invalidate(this);
  }

  draw() {
    const [context, width, height] = surface(this.canvas);
    if (!width || !height) return false;
    const body = this.#body;
    if (this.#stale || body.width !== this.canvas.width || body.height !== this.canvas.height) {
      body.width = this.canvas.width;
      body.height = this.canvas.height;
      const on = body.getContext("2d");
      on.scale(body.width / width, body.height / height);
      this.#stale = this.paint(on, width, height) === true; // it has more to paint
    }
    context.drawImage(body, 0, 0, width, height);
    if (this.timeline.cursor !== null) this.paintCursor(context, width, height);
    return this.#stale;
  }

  paintCursor(context, width, height) {
    const x = this.xOf(this.timeline.cursor, width);
    if (!Number.isFinite(x)) return;
    context.fillStyle = colours.ink;
    context.globalAlpha = 0.35;
    context.fillRect(Math.round(x), 0, 1, height);
    context.globalAlpha = 1;
  }

  xOf(round, width) {
    return this.timeline.scale(width).middle(round);
  }

  roundAt(x, width) {
    return this.timeline.scale(width).round(x);
  }

  rowAt() {
    return null;
  }

  #listen() {
    const { canvas, timeline } = this;
    let grabbed = null; // {x, moved}
    canvas.addEventListener("pointerdown", (event) => {
      grabbed = { x: event.clientX, moved: false };
      if (event.pointerType !== "mouse") this.#pointAt(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (grabbed && event.buttons) {
        const by = (grabbed.x - event.clientX) / timeline.scale(canvas.clientWidth).step;
        if (Math.abs(by) < 1 || (!grabbed.moved && Math.abs(grabbed.x - event.clientX) < 6)) return;
        if (!grabbed.moved) canvas.setPointerCapture(event.pointerId);
        grabbed = { x: event.clientX, moved: true };
        timeline.pan(by);
      } else this.#pointAt(event);
    });
    for (const type of ["pointerup", "pointercancel"]) canvas.addEventListener(type, () => (grabbed = null));
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") timeline.point(null);
      tip.hide();
    });
    canvas.addEventListener("wheel", (event) => {
      const sideways = event.shiftKey ? event.deltaY : event.deltaX;
      if (!event.ctrlKey && !event.metaKey && Math.abs(sideways) <= Math.abs(event.deltaY) && !event.shiftKey) return;
      event.preventDefault();
      const scale = timeline.scale(canvas.clientWidth);
      if (event.ctrlKey || event.metaKey) timeline.zoom(1.0025 ** event.deltaY, scale.round(event.offsetX));
      else timeline.pan(Math.sign(sideways) * Math.max(1, Math.abs(sideways) / scale.step));
    }, { passive: false });
  }

  #pointAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const { left } = this.timeline.scale(box.width);
    const row = this.rowAt(event.clientY - box.top);
    const mouse = event.pointerType === "mouse";
    this.timeline.point(x < left && row === null ? null : this.roundAt(x, box.width), row, mouse);
    if (mouse) tip.show(event.clientX, event.clientY, roundInWords(this.timeline));
  }
}

/** What there is to say of the round, and the member, pointed at: lines of text. */
function roundInWords(timeline) {
  if (timeline.cursor === null) return [];
  const round = timeline.rounds.at(timeline.cursor);
  if (!round) return [`Round ${whole(timeline.cursor)}`, "no delta known"];
  const lines = [
    `Round ${whole(round.round)}, ${when(round.time)}`,
    `loss ${lossText(round.loss)}, ours ${lossText(round.own)}`,
    `${plural(round.count, "delta")} of ${amount(round.tokens)} tokens` + (known(round.total) ? `, ${amount(round.total)} trained in all` : ""),
    `agreement ${cosine(round.agreement)}, staleness ${known(round.stale) ? round.stale.toFixed(1) : UNKNOWN}, at most ${whole(round.stalest)}`,
  ];
  return timeline.row === null ? lines : [...deltaInWords(timeline, round), ...lines];
}

function deltaInWords(timeline, round) {
  const { rounds, row } = timeline;
  const name = timeline.nameOf?.(row) ?? shortId(row);
  const at = rounds.deltaOf(round, rounds.indexOf.get(row));
  if (at < 0) return [`${name}: no delta`];
  const [, tokens, steps, staleness, loss, flags] = round.packed.subarray(at, at + WIDTH);
  const marks = [flags & VOID && "void: weighs nothing", flags & LATE && "late: came after the round was merged", flags & CLIPPED && "clipped"].filter(Boolean);
  return [`${name}: ${amount(tokens)} tokens in ${plural(steps, "step")}, loss ${lossText(loss)}, staleness ${whole(staleness)}`, ...marks];
}

/** The box beside the pointer. Its size is measured once per text, its place set by transform alone. */
const tip = {
  box: byId("tip"),
  show(x, y, lines) {
    if (!lines.length) return this.hide();
    keyed(this.box, lines.map((_, i) => i), () => el("div")).forEach((line, i) => setText(line, lines[i]));
    setHidden(this.box, false);
    const { offsetWidth: w, offsetHeight: h } = this.box;
    const left = x + 16 + w > innerWidth ? x - w - 12 : x + 16;
    const top = y + 16 + h > innerHeight ? y - h - 12 : y + 16;
    this.box.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  },
  hide() {
    setHidden(this.box, true);
  },
};
