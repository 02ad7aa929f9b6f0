// Who contributed to which round: members x rounds. Where several rounds share a column, a cell tells
// their share; late, void and clipped deltas keep their own marks.

const COLUMN_MIN = 3; // px; narrower rounds are drawn together
const FIGURES = 5; // a cell's counts
const COUNT_MS = 8; // what is not counted within a frame's share is counted in the next
const MATRIX_TALL = 720; // px; more rows scroll

class Matrix extends Strip {
  #order = []; // member ids, top to bottom
  #names = new Map();
  #rows = byId("matrix-rows");
  #spacer = byId("matrix-spacer");
  #rowOf = []; // by author index
  #counts = new Map(); // column -> Float32Array
  #per = 1; // rounds a column
  #kept = "";
  rowHeight = 20;
  shown = { rows: 0, columns: 0, perColumn: 1, cells: 0, complete: false };

  constructor(timeline, frames, focus) {
    super(byId("matrix"), timeline, frames);
    this.focus = focus;
    timeline.nameOf = (id) => this.#names.get(id) ?? shortId(id);
    this.#rows.addEventListener("scroll", () => this.refresh(), { passive: true });
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    focus.addEventListener("member", () => frames.invalidate(this));
  }

  update(state) {
    const members = [...state.members].sort(memberOrder).filter((m) => m.trains || this.timeline.rounds.indexOf.has(m.id));
    const shown = new Set(state.members.map((m) => m.id));
    const gone = [...this.timeline.rounds.indexOf.keys()].filter((id) => !shown.has(id)); // or not listed
    const order = [...members.map((m) => m.id), ...gone];
    const names = new Map(members.map((m) => [m.id, nameOf(m)]));
    const rowOf = new Map(order.map((id, row) => [id, row]));
    this.#rowOf = this.timeline.rounds.authors.map((id) => rowOf.get(id));
    const same = order.length === this.#order.length && order.every((id, i) => id === this.#order[i] && names.get(id) === this.#names.get(id));
    if (same) return;
    this.#order = order;
    this.#names = names;
    this.#counts.clear();
    this.rowHeight = order.length <= 8 ? 22 : order.length <= 24 ? 15 : 11;
    const tall = order.length * this.rowHeight;
    const visible = Math.min(tall, MATRIX_TALL);
    this.canvas.style.height = `${visible}px`;
    this.#spacer.style.height = `${tall - visible}px`;
    this.#rows.style.height = `${visible}px`;
    this.refresh();
  }

  /** Rounds `from` to `to` have changed. */
  forget(from, to) {
    for (const bin of this.#counts.keys()) if ((bin + 1) * this.#per > from && bin * this.#per <= to) this.#counts.delete(bin);
  }

  paint(context, width, height) {
    const scale = this.timeline.scale(width);
    const per = scale.step >= COLUMN_MIN ? 1 : Math.ceil(COLUMN_MIN / scale.step);
    const top = this.#rows.scrollTop;
    const firstRow = Math.floor(top / this.rowHeight);
    const lastRow = Math.min(this.#order.length, Math.ceil((top + height) / this.rowHeight));
    this.#keep(per, firstRow, lastRow);
    this.#paintNames(context, scale, firstRow, lastRow, top);
    const raster = new Raster(context.canvas, width, [scale.left, scale.right], per === 1 ? this.#mostTokens(scale) : per);
    const wide = per * scale.step; // half a pixel is one only on a fine screen
    const gap = wide >= 6 ? 1 : wide >= 4 && devicePixelRatio >= 2 ? 0.5 : 0;
    const until = performance.now() + COUNT_MS;
    let columns = 0, cells = 0, left = false;
    for (let bin = Math.floor(scale.last / per); (bin + 1) * per > scale.first; bin--, columns++) {
      left ||= performance.now() > until && !this.#counts.has(bin);
      const counts = left ? this.#counts.get(bin) : this.#binOf(bin, firstRow, lastRow);
      if (!counts) continue;
      const x0 = Math.max(scale.left, scale.x(bin * per)), x1 = Math.min(scale.right, scale.x((bin + 1) * per)) - gap;
      for (let row = firstRow, at = 0; row < lastRow; row++, at += FIGURES) {
        if (!counts[at]) continue;
        cells++;
        raster.cell(counts, at, x0, row * this.rowHeight - top + 1, x1 - x0, this.rowHeight - 2, per);
      }
    }
    raster.put();
    this.shown = { rows: lastRow - firstRow, columns, perColumn: per, cells, complete: !left };
    return left;
  }

  /** Counts stay valid while bins and rows are the same. */
  #keep(per, firstRow, lastRow) {
    const now = `${per} ${firstRow} ${lastRow}`;
    if (now !== this.#kept || this.#counts.size > 8192) this.#counts.clear();
    this.#kept = now;
    this.#per = per;
  }

  /** A column's figures: per row deltas, tokens, late, void, clipped. Columns begin at multiples of `per`. */
  #binOf(bin, firstRow, lastRow) {
    let counts = this.#counts.get(bin);
    if (counts) return counts;
    this.#counts.set(bin, (counts = new Float32Array((lastRow - firstRow) * FIGURES)));
    const { rounds } = this.timeline;
    const end = rounds.position((bin + 1) * this.#per);
    for (let i = rounds.position(bin * this.#per); i < end; i++) {
      const { packed } = rounds.list[i];
      for (let k = 0; k < packed.length; k += WIDTH) {
        const row = this.#rowOf[packed[k + AUTHOR]] ?? -1;
        if (row < firstRow || row >= lastRow) continue;
        const at = (row - firstRow) * FIGURES, flags = packed[k + FLAGS];
        counts[at]++;
        counts[at + 1] += packed[k + TOKENS] || 0;
        if (flags & LATE) counts[at + 2]++;
        if (flags & VOID) counts[at + 3]++;
        if (flags & CLIPPED) counts[at + 4]++;
      }
    }
    return counts;
  }

  #mostTokens({ first, last }) {
    let most = 1;
    for (let bin = first; bin <= last; bin++) {
      const counts = this.#counts.get(bin) ?? this.#binOf(bin, ...this.#kept.split(" ").slice(1).map(Number));
      for (let at = 1; at < counts.length; at += FIGURES) if (counts[at] > most) most = counts[at];
    }
    return most;
  }

  #paintNames(context, scale, firstRow, lastRow, top) {
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.font = font(Math.min(12, this.rowHeight));
    for (let row = firstRow; row < lastRow; row++) {
      const y = row * this.rowHeight - top;
      context.fillStyle = colours.cell;
      context.fillRect(scale.left, y + 1, scale.right - scale.left, this.rowHeight - 2);
      context.fillStyle = colours.muted;
      context.fillText(clipText(this.timeline.nameOf(this.#order[row]), scale.left < GUTTER ? 8 : 11), scale.left - 10, y + this.rowHeight / 2 + 0.5);
    }
  }

  draw() {
    const more = super.draw();
    const row = this.#order.indexOf(this.timeline.row ?? this.focus.pointed ?? this.focus.chosen);
    if (row < 0) return more;
    const context = this.canvas.getContext("2d");
    const { left, right } = this.timeline.scale(this.canvas.clientWidth);
    context.strokeStyle = colours.ink;
    context.globalAlpha = 0.45;
    context.lineWidth = 1;
    context.strokeRect(left - 1.5, row * this.rowHeight - this.#rows.scrollTop + 0.5, right - left + 3, this.rowHeight - 1);
    context.globalAlpha = 1;
    return more;
  }

  /** Where a member's cell of a round is drawn: [x, y]. */
  centerOf(id, round) {
    const scale = this.timeline.scale(this.canvas.clientWidth);
    return [scale.middle(round), (this.#order.indexOf(id) + 0.5) * this.rowHeight - this.#rows.scrollTop];
  }

  rowAt(y) {
    return this.#order[Math.floor((y + this.#rows.scrollTop) / this.rowHeight)] ?? null;
  }

  #key(event) {
    const { timeline } = this;
    const [first, last] = timeline.range;
    const cursor = timeline.cursor ?? last, row = Math.max(0, this.#order.indexOf(timeline.row));
    const leap = event.shiftKey ? Math.max(1, Math.round((last - first) / 10)) : 1;
    const moves = {
      ArrowLeft: () => this.#moveTo(cursor - leap, row),
      ArrowRight: () => this.#moveTo(cursor + leap, row),
      ArrowUp: () => this.#moveTo(cursor, row - 1),
      ArrowDown: () => this.#moveTo(cursor, row + 1),
      Home: () => this.#moveTo(timeline.rounds.first ?? 0, row),
      End: () => this.#moveTo(timeline.rounds.newest ?? 0, row),
      "+": () => timeline.zoom(0.5, cursor),
      "-": () => timeline.zoom(2, cursor),
      Escape: () => timeline.point(null),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  #moveTo(round, row) {
    const { timeline } = this;
    const to = Math.max(timeline.rounds.first ?? 0, Math.min(timeline.rounds.newest ?? 0, round));
    const [first, last] = timeline.range;
    if (to < first) timeline.pan(to - first);
    if (to > last) timeline.pan(to - last);
    timeline.point(to, this.#order[Math.max(0, Math.min(this.#order.length - 1, row))] ?? null);
  }
}

/** The scale under the strips. */
class Ruler extends Strip {
  constructor(timeline, frames) {
    super(byId("ruler"), timeline, frames);
  }

  paint(context, width) {
    const scale = this.timeline.scale(width);
    context.font = font(11);
    context.textBaseline = "top";
    context.fillStyle = colours.muted;
    for (const mark of ticks(scale.first, scale.last, Math.max(2, Math.floor((scale.right - scale.left) / 70)))) {
      if (mark !== Math.round(mark)) continue;
      const x = scale.middle(mark);
      context.fillRect(Math.round(x), 0, 1, 4);
      context.textAlign = x > scale.right - 24 ? "right" : "center";
      context.fillText(whole(mark), x, 7);
    }
    context.textAlign = "right";
    context.fillText("round", scale.left - 10, 7);
  }
}
