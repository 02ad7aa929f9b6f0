// Three strips over the rounds in view: loss, agreement of deltas, staleness.

/** A strip with a vertical scale; where several rounds share a pixel, their range and their mean are drawn. */
class Curve extends Strip {
  /** `inks`: {field of a round, colour, width, dash?}, drawn in that order. The scale takes in `least` and `most`. */
  constructor(canvas, timeline, frames, { inks, format, least = null, most = -Infinity, marks = 3 }) {
    super(canvas, timeline, frames);
    Object.assign(this, { inks, format, least, most, marks });
    this.log = false; // the scale, where all values allow it
    this.shown = 0; // rounds drawn
  }

  paint(context, width, height) {
    const [begin, end] = this.timeline.slice;
    const scale = this.horizontal(width);
    const [low, high] = this.#bounds(begin, end);
    const log = this.log && low > 0;
    const top = 8, bottom = height - 8, place = log ? Math.log : (value) => value;
    const y = (value) => bottom - ((place(value) - place(low)) / (place(high) - place(low))) * (bottom - top);
    this.shown = end - begin;
    this.y = y;
    this.vertical = { low, high, log };
    const marks = (log ? logTicks : ticks)(low, high, this.marks);
    const step = marks.length > 1 ? marks[1] - marks[0] : 1;
    this.#paintAxis(context, scale, marks, y, (mark) => (log ? String(Number(mark.toPrecision(4))) : this.format(mark, step)));
    for (const ink of this.inks) this.#paintSeries(context, ink, this.#columns(ink.field, scale, width), scale, y);
    this.paintMore?.(context, scale, y, low, high);
  }

  horizontal(width) {
    return this.timeline.scale(width);
  }

  /** Where a round's values are drawn: {field: [x, y]}. */
  placeOf(number) {
    const round = this.timeline.rounds.at(number);
    const x = this.horizontal(this.canvas.clientWidth).middle(number, round);
    return Object.fromEntries(this.inks.map(({ field }) => [field, [x, this.y(round[field])]]));
  }

  /** Values besides those of `inks` that are drawn over the rounds list[begin..end). */
  marked(begin, end) {
    return [];
  }

  #bounds(begin, end) {
    const { list } = this.timeline.rounds;
    let low = this.least ?? Infinity, high = this.most;
    for (const value of this.marked(begin, end)) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    for (const { field } of this.inks) {
      for (let i = begin; i < end; i++) {
        const value = list[i][field];
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    if (!Number.isFinite(low) || !Number.isFinite(high)) return [this.least ?? 0, 1];
    if (this.log && low > 0) {
      const by = Math.max(1.01, (high / low) ** 0.06);
      return [low / by, high * by];
    }
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return [this.least ?? low - pad, high + pad];
  }

  #paintAxis(context, scale, marks, y, text) {
    context.font = font(11);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const mark of marks) {
      const at = Math.round(y(mark));
      context.fillStyle = colours.line;
      context.fillRect(scale.left, at, scale.right - scale.left, 1);
      context.fillStyle = colours.muted;
      context.fillText(text(mark), scale.left - 10, at);
    }
  }

  /** Where rounds are wider than a pixel each is a column, else each pixel is: {x, low, high, mean}, all arrays. */
  #columns(field, scale, width) {
    const { list } = this.timeline.rounds;
    const [begin, end] = this.timeline.slice;
    const size = scale.step < 1 ? Math.ceil(width) + 1 : end - begin;
    const x = new Float64Array(size), low = new Float64Array(size).fill(Infinity), high = new Float64Array(size).fill(-Infinity);
    const sum = new Float64Array(size), count = new Uint32Array(size);
    for (let i = begin; i < end; i++) {
      const value = list[i][field], at = scale.middle(list[i].round, list[i]);
      if (Number.isNaN(value) || !(at >= 0 && at <= width)) continue;
      const k = scale.step < 1 ? Math.round(at) : i - begin;
      x[k] = scale.step < 1 ? k : at;
      if (value < low[k]) low[k] = value;
      if (value > high[k]) high[k] = value;
      sum[k] += value;
      count[k]++;
    }
    return { x, low, high, sum, count, size };
  }

  #paintSeries(context, ink, { x, low, high, sum, count, size }, scale, y) {
    context.strokeStyle = context.fillStyle = colours[ink.colour];
    if (scale.step < 1) {
      context.globalAlpha = 0.16;
      for (let k = 0; k < size; k++) if (count[k] > 1) context.fillRect(x[k] - 0.5, y(high[k]), 1, y(low[k]) - y(high[k]));
      context.globalAlpha = 1;
    }
    context.lineWidth = ink.width;
    context.lineJoin = "round";
    context.setLineDash(ink.dash ?? []);
    context.beginPath();
    for (let k = 0; k < size; k++) if (count[k]) context.lineTo(x[k], y(sum[k] / count[k]));
    context.stroke();
    context.setLineDash([]);
    if (scale.step < 24) return;
    for (let k = 0; k < size; k++) {
      if (!count[k]) continue;
      context.beginPath();
      context.arc(x[k], y(sum[k]), ink.width + 0.6, 0, 2 * Math.PI);
      context.fill();
    }
  }
}

/** Held-out losses of the live model and, above them, of the averaged one, which one uses. */
const HELD_OUT = [{ field: "live", colour: "pale", width: 1.1, size: 3 }, { field: "average", colour: "good", width: 2.4, size: 4.5 }];

/** The loss may be drawn over tokens, and carries the held-out losses that this node has measured. */
class LossCurve extends Curve {
  constructor(timeline, frames, stream) {
    super(byId("loss"), timeline, frames, {
      inks: [{ field: "own", colour: "accent", width: 1.1 }, { field: "loss", colour: "swarm", width: 1.8 }],
      format: (value, step) => value.toFixed(decimals(step)),
      marks: 5,
    });
    this.stream = stream;
  }

  setLog(log) {
    this.log = log;
    this.refresh();
  }

  horizontal(width) {
    const scale = this.timeline.scale(width);
    if (!this.timeline.byTokens) return scale;
    const [from, to] = this.#tokensInView();
    const x = (total) => scale.left + ((total - from) / (to - from || 1)) * (scale.right - scale.left);
    return { ...scale, middle: (number, round) => x((round ?? this.timeline.rounds.at(number))?.total) };
  }

  marked(begin, end) {
    const { list } = this.timeline.rounds;
    const from = list[begin]?.round, to = list[end - 1]?.round;
    return this.stream.evaluations.filter(({ round }) => round >= from && round <= to).flatMap(({ live, average }) => [live, average].filter(known));
  }

  paintMore(context, scale, y, low, high) {
    for (const ink of HELD_OUT) {
      const points = this.stream.evaluations
        .map((each) => [scale.middle(each.round), each[ink.field]])
        .filter(([x, loss]) => x >= scale.left && x <= scale.right && known(loss) && loss >= low && loss <= high);
      context.strokeStyle = context.fillStyle = colours[ink.colour];
      context.lineWidth = ink.width;
      context.beginPath();
      for (const [x, loss] of points) context.lineTo(x, y(loss));
      context.stroke();
      if (points.length * 4 * ink.size > scale.right - scale.left) continue; // marks would touch
      for (const [x, loss] of points) {
        context.beginPath();
        for (const [dx, dy] of [[0, -1], [1, 0], [0, 1], [-1, 0]]) context.lineTo(x + dx * ink.size, y(loss) + dy * ink.size);
        context.fill();
      }
    }
    if (!this.timeline.byTokens) return;
    context.font = font(11);
    context.textBaseline = "bottom";
    context.fillStyle = colours.muted;
    const [from, to] = this.#tokensInView();
    const bottom = this.canvas.clientHeight;
    const marks = ticks(from, to, Math.floor((scale.right - scale.left) / 130));
    for (const mark of marks) {
      const x = scale.left + ((mark - from) / (to - from || 1)) * (scale.right - scale.left);
      context.textAlign = x > scale.right - 40 ? "right" : "center";
      context.fillText(`${amount(mark)} tokens`, x, bottom);
    }
  }

  xOf(round, width) {
    if (!this.timeline.byTokens) return super.xOf(round, width);
    return this.horizontal(width).middle(round);
  }

  roundAt(x, width) {
    if (!this.timeline.byTokens) return super.roundAt(x, width);
    const { middle } = this.horizontal(width);
    let best = null, least = Infinity;
    for (const round of this.#visible()) {
      const distance = Math.abs(middle(round.round, round) - x);
      if (distance < least) [best, least] = [round.round, distance];
    }
    return best;
  }

  /** Tokens of the swarm after the first and the last round in view that say so. */
  #tokensInView() {
    const told = this.#visible().filter((round) => known(round.total));
    return [told[0]?.total ?? 0, told.at(-1)?.total ?? 1];
  }

  #visible() {
    return this.timeline.rounds.list.slice(...this.timeline.slice);
  }
}

const agreementCurve = (timeline, frames) =>
  new Curve(byId("agreement"), timeline, frames, {
    inks: [{ field: "agreement", colour: "swarm", width: 1.2 }],
    format: (value, step) => (value < 0 ? "−" : "") + Math.abs(value).toFixed(decimals(step)),
  });

const stalenessCurve = (timeline, frames) =>
  new Curve(byId("staleness"), timeline, frames, {
    inks: [{ field: "stale", colour: "swarm", width: 1.2 }, { field: "stalest", colour: "faint", width: 1, dash: [2, 2] }],
    format: (value, step) => value.toFixed(decimals(step)),
    least: 0,
    most: 1,
  });
