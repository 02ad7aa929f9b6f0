// Cells of the matrix as pixels: tens of thousands of them are too many for a canvas' own rectangles.

const INKS = 8; // steps of a cell's colour, from some to all
const MARK_FROM = 1 / 16; // in a cell of many rounds, late and clipped ones show from this share on

class Raster {
  /** Covers `canvas` between two x, in CSS pixels; `full` is what the deepest colour stands for. */
  constructor(canvas, width, [left, right], full) {
    this.canvas = canvas;
    this.ratio = canvas.width / width;
    this.left = Math.round(left * this.ratio);
    this.width = Math.max(1, Math.round(right * this.ratio) - this.left);
    this.full = full;
    this.image = new ImageData(this.width, canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.accent = mixes("accent");
    this.warn = mixes("warn");
    this.clip = mixes("clip")[INKS];
    this.bad = mixes("bad")[INKS];
    this.ground = mixes("cell")[INKS];
  }

  /** Draws a cell of counts[at...]: deltas, tokens, late, void, clipped, of `per` rounds.
   * The ink says how much was contributed; marks of clipped and late ones lie at the top and the bottom
   * edge; void ones are a frame, or a line through the others. */
  cell(counts, at, x, y, w, h, per) {
    const count = counts[at], late = counts[at + 2], wasVoid = counts[at + 3], clipped = counts[at + 4];
    if (wasVoid === count) {
      this.rect(x, y, w, h, this.bad);
      if (w >= 5) return this.rect(x + 1.5, y + 1.5, w - 3, h - 3, this.ground);
      return this.rect(x, y + 1.5, w, h - 3, this.ground);
    }
    const share = per === 1 ? Math.sqrt(counts[at + 1] / this.full) : count / this.full;
    const ink = Math.round((0.2 + 0.6 * Math.min(1, share)) * INKS); // the full colours are for marks
    this.rect(x, y, w, h, late === count ? this.warn[INKS] : this.accent[ink]);
    if (late < count && late > count * MARK_FROM) {
      const band = Math.max(1.5, (late / count) * h * 0.6);
      this.rect(x, y + h - band, w, band, this.warn[INKS]);
    }
    if (clipped > count * MARK_FROM) this.rect(x, y, w, Math.max(1.5, (clipped / count) * h * 0.4), this.clip);
    if (wasVoid) this.rect(x, y + h / 2 - 1, w, 2, this.bad);
  }

  rect(x, y, w, h, colour) {
    const x0 = Math.max(0, Math.round(x * this.ratio) - this.left);
    const x1 = Math.min(this.width, Math.max(Math.round((x + w) * this.ratio) - this.left, x0 + 1));
    const y0 = Math.max(0, Math.round(y * this.ratio)), y1 = Math.min(this.image.height, Math.round((y + h) * this.ratio));
    for (let row = y0; row < y1; row++) {
      const end = row * this.width + x1; // a loop: fill() costs more than these few pixels
      for (let i = end - x1 + x0; i < end; i++) this.pixels[i] = colour;
    }
  }

  put() {
    // By way of a bitmap of its own: putImageData would wipe out the rows' ground with transparent pixels.
    const sheet = document.createElement("canvas");
    sheet.width = this.width;
    sheet.height = this.image.height;
    sheet.getContext("2d").putImageData(this.image, 0, 0);
    const context = this.canvas.getContext("2d");
    context.save();
    context.resetTransform();
    context.drawImage(sheet, this.left, 0);
    context.restore();
  }
}

/** A colour in `INKS` steps from the rows' ground to itself, as the pixels of an ImageData. */
function mixes(name) {
  const numbers = (colour) => colour.match(/[\d.]+/g).slice(0, 3).map(Number);
  const from = numbers(colours.cell), to = numbers(colours[name]);
  return Array.from({ length: INKS + 1 }, (_, k) => {
    const bytes = from.map((a, i) => Math.round(a + (to[i] - a) * (k / INKS)));
    return new Uint32Array(new Uint8ClampedArray([...bytes, 255]).buffer)[0];
  });
}
